"""The picture of README and documentation: the first screen of the published page of the quick comparison.

`python -m tests.support.report_picture` takes it again, after the comparison has been published again.
"""

import tempfile
from pathlib import Path

from tests.support import pages
from tests.support.published_comparisons import ROOT, read_pages

PICTURE = ROOT / "docs" / "report.png"

PAGE = "quickstart.html"

SIZE = (1280, 1650)  # pixels


def main() -> None:
    """Open the page in a browser, and keep its first screen."""
    with tempfile.TemporaryDirectory() as folder, pages.browser() as browser:
        page_file = Path(folder) / PAGE
        page_file.write_bytes(read_pages()[PAGE])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector("main figure svg")
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
