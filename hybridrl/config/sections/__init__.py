"""The sections of the configuration, one file a concern; `hybridrl.config.schema` puts them together."""
