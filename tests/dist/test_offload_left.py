"""Several ranks of an out-of-core run end without ``close``, as processes of their own."""

from __future__ import annotations

import pytest

from holdfast.store.run_store import LocalStore
from support.warm_python import environment_of, start_python


def left(tmp_path, way):
    """What two ranks returned and said."""
    places = tmp_path / "rendezvous", tmp_path / "run"
    env = environment_of(GLOO_SOCKET_IFNAME="lo")
    ranks = [
        start_python("-m", "dist.unclosed", rank, *places, way, env=env, modules=["holdfast.offload.api"])
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=90)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], said


def newest(root):
    with LocalStore.read(root) as reader:
        manifest = reader.head()
        assert reader.verify(manifest) == []
        return manifest.step


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(("way", "step"), [("returns", 4), ("destroyed", 3)])
def test_ranks_that_return_end_as_they_would_without_an_engine(tmp_path, way, step):
    """With what was under way finished, unless the script has let go of the other ranks before."""
    codes, said = left(tmp_path, way)
    assert codes == [0, 0], said
    assert newest(tmp_path / "run") >= step


def test_a_rank_that_ends_by_an_error_ends_the_other_with_every_whole_step_durable(tmp_path):
    codes, said = left(tmp_path, "one raises")
    assert codes == [1, 1], said
    assert "RankFailed: " in said[0] and "ValueError: an error of the script" in said[1]
    assert newest(tmp_path / "run") == 3
