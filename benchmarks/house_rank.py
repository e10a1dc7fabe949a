"""One rank of what ``house.py`` follows: ``python benchmarks/house_rank.py TREE round|script CELLS HSDP``.

Rank 0 prints, as JSON, which functions of the package in TREE ran, which of its files were imported meanwhile, and the
deepest stack of its functions.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SHAPE = re.compile(r"federated=\(4, 4\), hsdp=2")
"""The cells of the README's script, for which the cells to measure are put."""


class Recorder:
    """A profile function that notes, while it is on, which functions of a package are called, and how deep."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}{os.sep}"
        self.is_on = False
        self.functions: set[tuple[str, str, int, int]] = set()
        self.imported: set[str] = set()
        self.chain: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(self.package):
            return
        file = code.co_filename.removeprefix(self.package)
        if not code.co_flags & 1:  # no fast locals: the body of a module or a class, which an import runs
            self.imported.add(file)
            return
        chain = self.chain_of(frame)
        if not chain:
            return
        last = max(line for *_, line in code.co_lines() if line is not None)
        self.functions.add((file, qualified_name(frame), code.co_firstlineno, last))
        if len(chain) > len(self.chain):
            self.chain = chain

    def start(self) -> None:
        """Record this thread and those that start from now on, when ``is_on``."""
        threading.setprofile(self)
        sys.setprofile(self)

    def chain_of(self, frame: FrameType | None) -> list[str]:
        """Return the functions of the package on the stack, the outermost first; none of an import."""
        chain = []
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.package):
                if not frame.f_code.co_flags & 1:
                    return []
                chain.append(f"{name.removeprefix(self.package)}:{frame.f_lineno} {qualified_name(frame)}")
            frame = frame.f_back
        return chain[::-1]

    def report(self) -> None:
        """Print what was recorded."""
        found = {
            "functions": sorted(self.functions),
            "imported": sorted(self.imported),
            "chain": self.chain,
        }
        print(json.dumps(found))


def qualified_name(frame: FrameType) -> str:
    """Return the name of a function with its class, where this Python knows it (3.11 and later)."""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def make_model() -> Any:
    """Return a model of two layers, in the place of the README's ``build_model``."""
    import torch

    class Answer(NamedTuple):  # FSDP2 looks for tensors in what a forward pass returns, and not in any object
        loss: torch.Tensor

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

        def forward(self, batch: torch.Tensor) -> Answer:
            return Answer(self.layers(batch).square().mean())

    return Model()


def make_batches(count: int) -> Any:
    """Yield batches that differ between ranks."""
    import torch

    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(count):
        yield torch.randn(4, 64, generator=generator)


def follow_round(recorder: Recorder, cells: tuple[int, ...], hsdp: int | None) -> None:
    """Record the second round of a training loop, from the call of the optimizer's step to its return."""
    import torch

    import xffl

    with xffl.session(federated=cells, device="cpu", **({} if hsdp is None else {"hsdp": hsdp})) as state:
        model = xffl.shard(make_model(), state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        recorder.start()  # before FederatedScaling may start threads
        with xffl.FederatedScaling(model, optimizer, state, every=1):
            for step, batch in enumerate(make_batches(3)):
                model(batch).loss.backward()
                recorder.is_on = step == 1
                optimizer.step()
                recorder.is_on = False
                optimizer.zero_grad()


def follow_script(recorder: Recorder, readme: str, cells: tuple[int, ...], hsdp: int | None) -> None:
    """Record the script that the README shows, from its first import to its end; two rounds are made."""
    import torch  # noqa: F401  # it is not what is measured, and takes most of the time when it is

    script = re.search(r"```python\n(import torch, xffl\n.*?)```", readme, re.DOTALL)
    if script is None or SHAPE.search(script[1]) is None:
        raise SystemExit("the README shows no script with 'import torch, xffl' and 'federated=(4, 4), hsdp=2'")
    arguments = f"federated={cells}" + ("" if hsdp is None else f", hsdp={hsdp}")
    program = compile(SHAPE.sub(arguments, script[1]), "README.md", "exec")
    recorder.start()
    recorder.is_on = True
    exec(program, {"build_model": make_model, "loader": make_batches(201)})
    recorder.is_on = False


def main() -> None:
    tree, what, cells, hsdp = Path(sys.argv[1]), sys.argv[2], tuple(map(int, sys.argv[3].split(","))), sys.argv[4]
    recorder = Recorder(tree / "xffl")
    if what == "round":
        follow_round(recorder, cells, None if hsdp == "-" else int(hsdp))
    else:
        readme = (tree / "README.md").read_text(encoding="utf-8")
        follow_script(recorder, readme, cells, None if hsdp == "-" else int(hsdp))
    sys.setprofile(None)
    if os.environ["RANK"] == "0":
        recorder.report()


if __name__ == "__main__":
    main()
