from tests.run_fixtures import corpus, make_run, run_folder  # noqa: F401
