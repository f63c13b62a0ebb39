"""The direction of imports, and other rules of the repository that no linter knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "shardc").rglob("*.py"))


def test_imports_go_one_way() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_private_torch_is_reached_through_one_module() -> None:
    """`torch._C`, `torch._subclasses` and the like are imported in `shardc/_torch.py` alone."""
    allowed = {"torch._ops", "torch.utils._pytree"}
    found = []
    for path in FILES:
        if path.name == "_torch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                private = name.startswith("torch") and any(part.startswith("_") for part in name.split("."))
                if private and not any(name.startswith(a) for a in allowed):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert not found, "\n".join(found)


def test_files_are_short_and_catch_what_they_name() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 450, f"{path.relative_to(ROOT)} has {len(text.splitlines())} lines"
        bare = [n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ExceptHandler) and n.type is None]
        assert not bare, f"{path.relative_to(ROOT)}: bare except in lines {bare}"


def test_importing_shardc_needs_no_test_library() -> None:
    libraries = ("hypothesis", "transformers", "matplotlib", "pytest")
    code = f"import sys, shardc, shardc.testing; print([m for m in {libraries} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
