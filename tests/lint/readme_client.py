#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The C++ client of docs/use/cpp.md: the build compiles it as it stands there, and a test runs it against a server.

readme_client.py extract PAGE OUT       write the block to a source file
readme_client.py run SERVER CLIENT      start SERVER on a free port, run CLIENT, stop SERVER
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import time


def extract(page, out):
    blocks = re.findall(r"^```cpp\n(.*?)^```$", pathlib.Path(page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if len(blocks) != 1 or "int main" not in blocks[0]:
        sys.exit(f"{page}: expected one C++ block with a main, found {len(blocks)} block(s)")
    pathlib.Path(out).write_text(blocks[0], encoding="utf-8")


def wait_for_port(server, port_file):
    deadline = time.monotonic() + 60
    while not port_file.exists() or not port_file.read_text(encoding="utf-8").strip():
        if server.poll() is not None:
            sys.exit(f"the server ended at its start with status {server.returncode}")
        if time.monotonic() > deadline:
            sys.exit("the server did not write its port in 60 s")
        time.sleep(0.02)  # between two looks at the condition
    return port_file.read_text(encoding="utf-8").strip().rsplit(":", 1)[-1]


def run(server_program, client_program):
    with tempfile.TemporaryDirectory() as folder:
        port_file = pathlib.Path(folder) / "port"
        server = subprocess.Popen([server_program, "--listen=127.0.0.1:0", f"--port-file={port_file}"],
                                  stdin=subprocess.DEVNULL)
        try:
            port = wait_for_port(server, port_file)
            done = subprocess.run([client_program, f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=60,
                                  check=False)
        finally:
            server.terminate()
            status = server.wait(timeout=60)
    print(done.stdout + done.stderr)
    if done.returncode != 0 or not re.match(r"OK PRECONDITIONED -?[\d.]+", done.stdout):
        sys.exit(f"the client's status is {done.returncode}; expected 'OK PRECONDITIONED' and two numbers")
    if re.match(r"OK PRECONDITIONED 1\.3 1\.7$", done.stdout.strip()):
        sys.exit("the gradient came back as it was sent")
    if status != 0:
        sys.exit(f"the server ended with status {status} after SIGTERM")


if __name__ == "__main__":
    {"extract": extract, "run": run}[sys.argv[1]](sys.argv[2], sys.argv[3])
