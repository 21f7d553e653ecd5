"""The error of data that cannot be used as the configuration says."""


class DataError(ValueError):
    """Names the file, row and key, what was found and what was expected."""
