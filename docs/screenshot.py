"""Photographs a run's page in TensorBoard, for README.md. Needs `chromium` on the PATH.

    .venv/bin/tropism fit --config experiments/loop.yaml --trainer.val_check_interval 20 \
        --trainer.callbacks+ tropism_callbacks.KLDrift
    .venv/bin/python docs/screenshot.py runs/loop/version_0 docs/tensorboard.png
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from PIL import Image

LOADING = 60  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--tab", default="custom_scalars", help="or images, text, hparams")
    parser.add_argument("--size", default="1850,1805", help="width,height of the window")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"http://localhost:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as scratch:
        logs, photograph = Path(scratch, "runs"), Path(scratch, "page.png")
        link = logs / arguments.run.absolute().parent.name / arguments.run.name
        link.parent.mkdir(parents=True)
        link.symlink_to(arguments.run.absolute(), target_is_directory=True)
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", logs.name]
        command += ["--port", address.rsplit(":", 1)[1]]
        server = subprocess.Popen(command, cwd=scratch)
        try:
            wait_for(f"{address}/data/plugin/custom_scalars/layout")
            browser = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
            browser += [f"--window-size={arguments.size}", f"--screenshot={photograph}"]
            browser += [f"--virtual-time-budget={LOADING * 1000}"]
            subprocess.run([*browser, f"{address}/#{arguments.tab}"], check=True)
        finally:
            server.terminate()
            server.wait()
        with Image.open(photograph) as page:
            page.convert("RGB").quantize(64).save(arguments.picture, optimize=True)


def wait_for(address: str) -> None:
    """Until the server has read the run's layout."""
    for _ in range(LOADING):
        try:
            with urllib.request.urlopen(address) as answer:
                if b"category" in answer.read():
                    return
        except OSError:
            pass
        time.sleep(1)
    raise TimeoutError(f"{address} shows no layout after {LOADING} s.")


if __name__ == "__main__":
    main()
