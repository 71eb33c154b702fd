"""The README's snippets are what they say: twelve lines that run as they stand and go on when run again, and three
that are added to a loop."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.loops import same
from support.warm_python import environment_of, run_python

ROOT = Path(__file__).parent.parent


def snippet():
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def test_the_snippet_is_twelve_lines_that_fit_a_screen():
    lines = snippet().splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) <= 110


@pytest.mark.slow
def test_the_snippet_runs_and_continues(tmp_path):
    command = [sys.executable, "-W", "error", "-c", snippet().replace("< 20", "< 3")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    first = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert first.returncode == 0, first.stderr
    assert [line.split(":")[0] for line in first.stdout.splitlines()] == ["step 1", "step 2", "step 3"]
    again = tmp_path / "again.py"
    again.write_text(snippet().replace("< 20", "< 5"))
    second = run_python(again, env=environment_of(), cwd=tmp_path, timeout=60)
    assert [line.split(":")[0] for line in second.stdout.splitlines()] == ["step 4", "step 5"]


LOOP = """
import holdfast, torch
from torch import nn

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.dropout, self.head = nn.Embedding(11, 8), nn.Dropout(0.1), nn.Linear(8, 11)

    def forward(self, X, Y):
        logits = self.head(self.dropout(self.wte(X)))
        return logits, nn.functional.cross_entropy(logits.view(-1, 11), Y.view(-1))

def get_batch(split):
    at = torch.randint(0, 190, (4,))
    return torch.stack([text[i : i + 8] for i in at]), torch.stack([text[i + 1 : i + 9] for i in at])

def get_lr(step):
    return 0.1 / (1 + step)

torch.manual_seed(0)
text = torch.randint(0, 11, (200,))
model, grad_clip, iter_num = GPT(), 0.1, 0
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
"""


@pytest.mark.slow
def test_three_lines_added_to_a_loop_bring_it_back_bit_for_bit(tmp_path, monkeypatch):
    lines = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1].splitlines()
    assert sum(line.startswith("+") for line in lines) == 3
    plain = [line[1:] for line in lines if not line.startswith("+")]

    def trained(loop, max_iters):
        names = {"max_iters": max_iters}
        exec(LOOP + "\n".join(loop), names)
        if "ckpt" in names:
            names["ckpt"].close()
        return names["model"].state_dict()

    monkeypatch.chdir(tmp_path)
    trained([line[1:] for line in lines], 5)
    assert same(trained([line[1:] for line in lines], 12), trained(plain, 12))
