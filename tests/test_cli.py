"""The command line: dry runs of scripts, and the rule table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardc.cli import main, parse_mesh
from shardc.errors import MeshError

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"
SMALL = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "16"]


def test_parse_mesh() -> None:
    assert parse_mesh("dp=8,tp=2").axes == {"dp": 8, "tp": 2} and parse_mesh("dp=-1").axes == {"dp": -1}
    for text in ("8", "dp=", "dp=2,dp=3", "dp=x"):
        with pytest.raises(MeshError, match="not a list of axes"):
            parse_mesh(text)


def test_plan_of_the_example_for_64_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    assert main(["plan", str(EXAMPLE), "--mesh", "dp=64", "--save", str(saved), *SMALL, "--zero", "3"]) == 0
    out = capsys.readouterr().out
    assert "dp=64" in out and "zero 3" in out and "model.blocks." in out and saved.is_file()


def test_plan_explains_a_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLE), "--mesh", "dp=4", "--explain", "model.wte.weight", *SMALL]) == 0
    assert "model.wte.weight" in capsys.readouterr().out


def test_a_script_without_a_step_and_a_missing_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text("print('nothing to see')\n")
    assert main(["plan", str(script)]) == 1
    assert "without calling a compiled step" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "missing.py")]) == 1
    assert "missing.py" in capsys.readouterr().err


def test_the_script_finds_its_neighbours_arguments_and_errors_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "neighbour.py").write_text("WIDTH = 8\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport torch\nimport shardc\nfrom neighbour import WIDTH\n"
        "assert sys.argv[1:] == ['--flag'] and __name__ == '__main__'\n"
        "@shardc.compile(mesh={'dp': 2}, zero=3)\n"
        "def step(model, optimizer, x):\n"
        "    loss = model(x).square().mean()\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n    return loss\n"
        "model = torch.nn.Linear(WIDTH, WIDTH)\n"
        "try:\n    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, WIDTH))\n"
        "except Exception:\n    raise SystemExit(3)\n"
    )
    assert main(["plan", str(script), "--flag"]) == 0
    assert "dp=2" in capsys.readouterr().out
    assert main(["plan", str(script), "--mesh", "tp=2", "--flag"]) in (0, 1)
    assert main(["plan", str(script), "--stage", "nonsense", "--flag"]) == 1
    assert "no pass 'nonsense'" in capsys.readouterr().err
    assert "neighbour" not in [Path(p).name for p in sys.path]


def test_rules_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "aten.mm*"]) == 0
    assert "aten.mm" in capsys.readouterr().out
    assert main(["rules", "no.such.*"]) == 1


def test_installed_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "shardc.cli", "--help"], capture_output=True, text=True, check=True)
    assert "plan" in done.stdout and "rules" in done.stdout
