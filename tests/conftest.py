"""Fixtures of the tests that need a browser."""

from browsing import browser, serve, site  # noqa: F401
