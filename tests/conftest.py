"""What holds for all tests: hypothesis measures no deadlines, the cores may be busy with others."""

from hypothesis import settings

settings.register_profile("busy cores", deadline=None)
settings.load_profile("busy cores")
