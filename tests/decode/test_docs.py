"""The code of docs/drafting.md runs, and does what the page says."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "drafting.md"


def test_the_policy_of_the_page_leaves_the_output_as_it_is():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    names = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["draft"].policy.budget == 256
