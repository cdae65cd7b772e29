"""`zerolab lab` finds the lessons, or says in one sentence what to do; tests/browser starts it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from zerolab.course import lab


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with two lessons, into which the process has changed; nothing is ever served."""
    (tmp_path / "lessons").mkdir()
    for name in ("05_stage_1.ipynb", "04_memory.ipynb"):
        (tmp_path / "lessons" / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        lab, "__file__", str(tmp_path / "elsewhere" / "zerolab" / "course" / "lab.py")
    )
    return tmp_path


@pytest.fixture
def served(monkeypatch):
    calls = []
    monkeypatch.setattr(lab, "_serve", lambda *args: calls.append(args))
    return calls


def test_the_first_lesson_by_name_is_opened(clone, served):
    assert lab.start_lab() == 0
    root, lesson, port, _, private = served[0]
    assert (root, lesson, port) == (clone, clone / "lessons" / "04_memory.ipynb", None)
    assert not Path(private).exists(), "nothing is left behind"


@pytest.mark.parametrize("asked", ["05", "05_stage_1.ipynb", "lessons/05_stage_1.ipynb"])
def test_another_lesson_is_opened_by_its_number_or_path(clone, served, asked):
    assert lab.start_lab(notebook=asked) == 0
    assert served[0][1].name == "05_stage_1.ipynb"


def test_a_folder_can_be_the_clone_or_hold_the_notebooks_itself(clone, served, monkeypatch):
    monkeypatch.chdir("/")
    assert lab.start_lab(clone) == lab.start_lab(clone / "lessons") == 0
    assert [call[0] for call in served] == [clone, clone / "lessons"]
    assert served[0][1] == served[1][1]


def test_outside_of_a_clone_one_sentence_says_what_to_do(clone, served, monkeypatch, capsys):
    empty = clone / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert lab.start_lab() == lab.start_lab(empty) == 2
    said = capsys.readouterr().err.splitlines()
    assert all("inside the clone" in line and "zerolab lab FOLDER" in line for line in said)
    assert len(said) == 2
    assert not served


def test_a_lesson_that_is_not_there_and_a_port_in_use_are_named(clone, served, capsys):
    assert lab.start_lab(notebook="09") == 2
    assert "No lesson's name begins with 09" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert lab.start_lab(port=port) == 2
    assert f"Port {port} is in use" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(("display", "opens"), [("", False), (":0", True)])
def test_a_browser_is_opened_only_where_it_can_be_seen(clone, served, monkeypatch, display, opens):
    monkeypatch.setattr(lab.sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", display)
    lab.start_lab()
    lab.start_lab(open_browser=False)
    assert [call[3] for call in served] == [opens, False]
