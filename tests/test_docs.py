"""Every Python block of the documentation runs; blocks of one page share their names, from top to bottom."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        # Padded, so that errors and captured source lines show the page's own line.
        exec(compile("\n" * line + match.group(1), str(page), "exec"), module.__dict__)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", BLOCK.sub("", page.read_text())):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
