from tests.run_fixtures import corpus, run_folder  # noqa: F401
