"""Settings of every test: properties are checked without a clock, since kernels compile at their first call."""

from hypothesis import settings

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")
