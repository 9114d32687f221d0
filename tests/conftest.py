"""What all tests share."""

from hypothesis import HealthCheck, settings

# A busy machine may take its time over an example; pytest's own timeout ends what hangs.
settings.register_profile("afdpatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("afdpatch")
