"""Settings for the property tests of the core."""

from hypothesis import settings

settings.register_profile("core", deadline=None)  # a slow machine is no bug
settings.load_profile("core")
