import pytest
from workers import Pool


@pytest.fixture(scope="session")
def pool():
    made = Pool()
    yield made
    made.close()
