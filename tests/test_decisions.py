"""Decision records: listed in their index under their own titles, and there where the project refers to them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = {path.name[:4]: path for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}


def test_the_index_has_every_record_once_under_its_title() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.MULTILINE)
    titles = [(path.read_text().splitlines()[0].removeprefix("# "), path.name) for path in RECORDS.values()]
    assert sorted(listed) == sorted(titles)


def test_every_record_that_is_referred_to_is_there() -> None:
    texts = [path for kind in ("*.md", "*.py", "docs/*.md") for path in ROOT.glob(kind)]
    texts += [path for package in ("rollout_service", "learner", "workers") for path in (ROOT / package).rglob("*.py")]
    named = {number for path in texts for number in re.findall(r"decisions/(\d{4})", path.read_text())}
    named |= {number for path in RECORDS.values() for number in re.findall(r"\b00\d\d\b", path.read_text())}
    assert named <= set(RECORDS)
    assert len(named) > 5
