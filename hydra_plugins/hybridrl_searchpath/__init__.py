"""Hydra finds hybridrl's own configuration here: `conf/` on the search path, `recipes/` as the group `recipe`."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hybridrl.config.folders import CONF, RECIPES

GROUP = "recipe"


class HybridrlSearchPath(SearchPathPlugin):
    """Appends both folders behind the application's own, so that another hydra program sees no change."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="hybridrl", path=f"file://{CONF}")
        search_path.append(provider="hybridrl", path=f"{RecipeSource.scheme()}://{RECIPES}")


class RecipeSource(ConfigSource):
    """A folder of YAML files served under the group `recipe`; the folder itself bears another name.

    Everything but the name is left to hydra's own source for files.
    """

    def __init__(self, provider: str, path: str) -> None:
        # Imported late: at module level hydra's scan of plugins would register the class a second time, as ours.
        from hydra._internal.core_plugins.file_config_source import FileConfigSource

        super().__init__(provider=provider, path=path)
        self._files = FileConfigSource(provider=provider, path=f"file://{self.path}")

    @staticmethod
    def scheme() -> str:
        return "hybridrl-recipes"

    @staticmethod
    def _inside(config_path: str) -> str | None:
        """The path within the folder; None for what is not in the group."""
        head, _, rest = config_path.strip("/").partition("/")
        return rest if head == GROUP else None

    def available(self) -> bool:
        return self._files.available()

    def is_group(self, config_path: str) -> bool:
        inside = self._inside(config_path)
        return config_path == "" if inside is None else self._files.is_group(inside)

    def is_config(self, config_path: str) -> bool:
        inside = self._inside(config_path)
        return inside is not None and self._files.is_config(inside)

    def load_config(self, config_path: str) -> ConfigResult:
        inside = self._inside(config_path)
        if not inside:
            raise ValueError(f"'{config_path}' is not in the group '{GROUP}'")
        return self._files.load_config(inside)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        inside = self._inside(config_path)
        if inside is not None:
            return self._files.list(inside, results_filter)
        return [GROUP] if config_path == "" and results_filter in (None, ObjectType.GROUP) else []
