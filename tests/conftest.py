"""What holds for all tests: hypothesis measures no deadlines, the cores may be busy with others."""

from hypothesis import settings

settings.register_profile("busy cores", deadline=None)
settings.load_profile("busy cores")


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the files of tests/golden/json anew"
    )
