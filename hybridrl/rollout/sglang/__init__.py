"""The SGLang engine. Importing this package imports neither torch nor SGLang."""
