"""The version, without importing anything."""

VERSION = "0.1.0"
__version__ = VERSION
