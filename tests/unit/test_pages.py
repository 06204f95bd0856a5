"""Pages made from code are up to date."""

from pathlib import Path

import pytest

from tests.pages import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run scripts/docs"
