"""The command line on a pseudo terminal."""

import os
import pty
import re
import subprocess
import sys
import threading

from tests.support.command_line import HANG_S, WARM

CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\r\x07]")


AGENTFSM = ("-m", "agentfsm")


class Terminal:
    """The command on a pseudo terminal, and what its screen was sent."""

    def __init__(self, shell, *words, program=AGENTFSM, **env):
        ours, theirs = pty.openpty()
        env = shell.env | {"COLUMNS": "120", "LINES": "50"} | env
        streams = (theirs, theirs, theirs)
        if program == AGENTFSM and WARM.can_start(AGENTFSM, env):
            self.popen = WARM.start((*program, *words), shell.folder, env, streams=streams)
        else:
            python = [sys.executable] if program == AGENTFSM else []
            self.popen = subprocess.Popen(
                [*python, *program, *words],
                cwd=shell.folder,
                env=env,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        os.close(theirs)
        self.fd = ours
        self.raw = ""
        self._news = threading.Condition()
        self._open = True
        self._build_getter = threading.Thread(target=self._read)
        self._build_getter.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # the other end is closed
                data = b""
            with self._news:
                self.raw += data.decode("utf-8", "replace")
                self._open = bool(data)
                self._news.notify_all()
            if not data:
                return

    @property
    def text(self):
        return CONTROLS.sub("", self.raw)

    def wait_for(self, text, times=1):
        with self._news:
            found = self._news.wait_for(lambda: self.text.count(text) >= times or not self._open, HANG_S)
        assert found, f"{text!r} never came"
        assert self.text.count(text) >= times, f"{text!r} never came:\n{self.text}"

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        code = self.popen.wait(HANG_S)
        self._build_getter.join(HANG_S)
        os.close(self.fd)
        return code
