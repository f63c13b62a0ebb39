"""Train the example in float32 and in bfloat16 at zero 3 from the same state on the same data, and compare losses and bytes.

    python benchmarks/precision.py --steps 200       # two simulated ranks; other options are those of examples/train_gpt.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from train_gpt import Text, evaluate, make_state, parse, train

import shardc

LIMIT = 0.01
LAST = 10


def curve(argv: list[str], precision: str | None) -> tuple[list[float], float, int]:
    """The training losses, the held-out loss at the end, and the bytes of parameters that a rank sends in a step."""
    args = parse(argv)
    text, mesh = Text(), shardc.Mesh(dp=2, simulated=True)
    model, optimizer, schedule = make_state(args)
    step = shardc.compile(train, mesh=mesh, zero=3, precision=precision)
    held_out = shardc.compile(evaluate, mesh=mesh, zero=3)
    losses = []
    for i in range(args.steps):
        batch = text.batch(text.train, args.batch, args.context, args.seed + i)
        losses.append(step(model, optimizer, *batch, args.clip).item())
        schedule.step()
        if (i + 1) % 20 == 0:
            print(f"{precision or 'float32'}: step {i + 1}, loss {losses[-1]:.4f}", flush=True)
    batches = [text.batch(text.held_out, args.batch, args.context, 10**6 + i) for i in range(8)]
    loss = sum(held_out(model, *batch).item() for batch in batches) / len(batches)
    return losses, loss, step.plan.communication.bytes_of("parameters")


def main(argv: list[str]) -> int:
    wide, narrow = (curve(argv, precision) for precision in (None, "bf16"))
    found = {f"training, mean of the last {LAST} steps": [sum(x[0][-LAST:]) / LAST for x in (wide, narrow)],
             "held out": [wide[1], narrow[1]]}  # fmt: skip
    worst = 0.0
    for name, (a, b) in found.items():
        worst = max(worst, abs(b - a) / a)
        print(f"{name}: float32 {a:.4f}, bf16 {b:.4f}, {100 * (b - a) / a:+.2f} %")
    print(f"parameters, bytes a rank sends in a step: float32 {wide[2]:,}, bf16 {narrow[2]:,}: {wide[2] / narrow[2]:g} times")
    return int(not (worst <= LIMIT and wide[2] == 2 * narrow[2]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
