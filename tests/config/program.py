"""The smallest program behind `hydra_main`: prints what it was given. Run it as a script."""

import json
import os
from dataclasses import asdict

from hybridrl.config.load import hydra_main, save_config
from hybridrl.config.schema import Config


def task(config: Config) -> None:
    if os.environ.get("RANK", "0") == "0":
        save_config(config, config.trainer.output_dir)
    print(json.dumps(asdict(config)))


main = hydra_main(task)

if __name__ == "__main__":
    main()
