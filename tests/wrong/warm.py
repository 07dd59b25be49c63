"""Python that is warm: scripts start in it without importing torch and its optimizers again, 4 s of a CPU each.

python warm.py SOCKET           waits for requests; for each it forks a process, in which the recorder begins
python -S warm.py SOCKET FILE   runs FILE, or -m MODULE, in such a process, in this folder, with this environment
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress

FILE_AND_ENVIRONMENT = 2**20  # bytes, at most


def ask(at, *argv):
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(at)
        socket.send_fds(server, [json.dumps([os.getcwd(), argv, dict(os.environ)]).encode()], [1, 2])
        return int(server.recv(1) or b"0")  # nothing: the recorder has ended it


def answer(client):
    request, outputs, *_ = socket.recv_fds(client, FILE_AND_ENVIRONMENT, 2)
    folder, sys.argv, environment = json.loads(request)
    os.environ.update(environment)
    os.chdir(folder)
    for at, output in enumerate(outputs, start=1):
        os.dup2(output, at)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    importlib.import_module("ring_doctor_recorder").begin()
    status = b"0"
    try:
        if module := sys.argv[0] == "-m":
            del sys.argv[0]
        (runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name="__main__")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = b"1"
    with suppress(BrokenPipeError):  # who asked has been ended
        client.send(status)


def serve(at):
    import torch

    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()  # imports what any optimizer imports at its first step
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(at)
        server.listen()
        while True:
            client, _ = server.accept()
            if not os.fork():
                answer(client)
                os._exit(0)
            client.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(*sys.argv[1:]))
    serve(sys.argv[1])
