"""The choice of CPUs for the threads that write beside training.

"auto" takes the CPUs that the system allows and that no rank of this host is confined to, as by ``taskset`` or by a
launcher that binds each rank to cores. Where ranks may use all CPUs, as is usual, there are none: the system then
places all threads. Called by ``Checkpointer``, once.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Literal

from ...distributed import Ranks
from ...errors import BadInput
from ...io.threads import allowed_cpus, used_cpus

HelperCpus = Sequence[int] | Literal["auto"] | None
"""The numbers of CPUs, "auto" to have spare ones found, or None to leave threads where they are."""


def chosen_cpus(given: HelperCpus, ranks: Ranks, replica: Any) -> tuple[int, ...]:
    """Return the CPUs of this rank's helper threads; none leaves them where they are.

    Collective: every rank must call this. Raises ``BadInput`` for CPUs that the system does not allow.
    """
    with ranks.agreeing():
        _refuse_bad(given, replica)
    gathered = ranks.everyone((given == "auto", socket.gethostname(), sorted(used_cpus())))
    if given is None:
        return ()
    if not isinstance(given, str):
        return tuple(given)
    used = {cpu for _, host, cpus in gathered if host == gathered[ranks.rank][1] for cpu in cpus}
    return tuple(sorted(allowed_cpus() - used))


def _refuse_bad(given: Any, replica: Any) -> None:
    if given is None:
        return
    if replica is not False:
        raise BadInput(
            "helper_cpus= with replica= is not offered: the replica writes, in a process of its own. Start the script"
            " with a mask for both (taskset), or leave out one of them."
        )
    if given == "auto":
        return
    is_list = isinstance(given, (list, tuple, set, range)) and all(type(cpu) is int for cpu in given)
    if not is_list or not given:
        raise BadInput(
            f'helper_cpus = {given!r} is neither "auto" nor a list of CPU numbers; leave it out for none'
        )
    allowed = allowed_cpus()
    if not allowed.issuperset(given):
        raise BadInput(
            f"helper_cpus = {sorted(given)}: the system allows this process the CPUs {sorted(allowed)}. Give some of"
            ' these, or "auto".'
        )
