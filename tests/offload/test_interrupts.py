"""A key press during a step takes effect at the next safe point."""

from __future__ import annotations

import signal
import threading

import pytest

from holdfast.offload.interrupts import deferred


def test_a_press_is_noted_and_raised_at_the_next_safe_point():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred() as safe_point:
        safe_point()
        signal.raise_signal(signal.SIGINT)
        reached.append("after the press")
        safe_point()
        reached.append("after the safe point")
    assert reached == ["after the press"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_after_the_last_safe_point_is_raised_at_the_end():
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)


def test_a_second_press_is_raised_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first"]


def test_an_error_is_not_replaced_by_a_press():
    with pytest.raises(LookupError), deferred():
        signal.raise_signal(signal.SIGINT)
        raise LookupError


def test_a_handler_of_the_callers_own_stays():
    pressed = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with deferred() as safe_point:
            signal.raise_signal(signal.SIGINT)
            safe_point()
        assert pressed == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_on_another_thread_signals_are_not_touched():
    def enter():
        with deferred() as safe_point:
            safe_point()
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
