"""Settings of the whole suite: property tests draw the same examples in every run, and slow machines are no failure."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "hisparse",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("hisparse")
