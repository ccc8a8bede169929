"""Hashes of HATA's authors: the codes are theirs, and a file that does not fit is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jspec
from jspec import CheckpointError, LayerSpec
from jspec.cli import main
from jspec.models.hata_weights import read_hata_weights
from jspec.ops.hash import hamming_scores, hash_encode

HEADS, KV_HEADS, SIZE, BITS = 4, 2, 16, 64
SPEC = LayerSpec(KV_HEADS, SIZE, SIZE)
SPECS = (SPEC,) * 4


def weights(layers=(2, 3), shape=(KV_HEADS, SIZE, BITS), dtype=np.float16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"hash_weight_layer_{layer:02d}": rng.standard_normal(shape).astype(dtype)
        for layer in layers
    }


def authors_codes(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """int32 ``[T, N, R / 32]``: sums of 2^j over the columns j of a word whose x W is above 0."""
    group = x.shape[1] // len(w)
    is_set = np.einsum("tnh,nhr->tnr", x, np.repeat(w, group, axis=0)) > 0
    words = is_set.reshape(*x.shape[:2], -1, 32).astype(np.int64)
    return (words * 2 ** np.arange(32)).sum(axis=-1).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("shape", [(KV_HEADS, SIZE, BITS), (SIZE, BITS)], ids=["heads", "shared"])
def test_codes_and_scores_are_those_of_the_authors(shape, tmp_path):
    stored = weights(shape=shape)
    save_file(stored, tmp_path / "hata.safetensors")
    hashes, random_layers = read_hata_weights(tmp_path / "hata.safetensors", SPECS)
    assert random_layers == [0, 1]
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((5, n, SIZE)).astype(np.float32) for n in (HEADS, KV_HEADS))
    for layer in (2, 3):
        w = np.broadcast_to(stored[f"hash_weight_layer_{layer:02d}"], (KV_HEADS, SIZE, BITS))
        w = w.astype(np.float32)
        imported = hashes[layer]
        assert imported is not None
        codes = [hash_encode(jnp.asarray(x[None]), imported) for x in (q, k)]
        expected = [authors_codes(x, w) for x in (q, k)]
        for got, code in zip(codes, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(got)[0].view(np.int32), code)
        # Their distance, summed over the query heads of a KV head.
        differs = expected[0][:1, :, None].view(np.uint32) ^ np.repeat(
            expected[1].view(np.uint32).transpose(1, 0, 2), 2, axis=0
        )
        distance = np.unpackbits(differs.view(np.uint8), axis=-1).sum(axis=-1)[0]
        distance = distance.reshape(KV_HEADS, 2, 5).sum(axis=1)
        scores = hamming_scores(codes[0][:, :1], codes[1])
        np.testing.assert_array_equal(np.asarray(scores)[0], 2 * BITS - distance)


def test_layers_with_a_window_have_no_hashes(tmp_path):
    specs = (*SPECS[:2], LayerSpec(KV_HEADS, SIZE, SIZE, window=8), SPEC)
    save_file(weights(), tmp_path / "hata.safetensors")
    hashes, random_layers = read_hata_weights(tmp_path / "hata.safetensors", specs)
    assert [w is None for w in hashes] == [False, False, True, False]
    assert random_layers == [0, 1]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (weights(shape=(4, SIZE, BITS)), r"\[4, 16, 64\], but must have .* = \[2, 16\] and R"),
        (weights(shape=(KV_HEADS, BITS, SIZE)), r"\[2, 64, 16\], but must have"),
        (weights(shape=(KV_HEADS, SIZE, 48)), "one R of 32, 64, 128, 256"),
        (weights() | weights((2,), (KV_HEADS, SIZE, 32)), r"\[2, 16, (32|64)\], but must have"),
        (weights() | {"hash_weight_layer_002": np.zeros(2, np.float32)}, "is of layer 2, but"),
        (weights((2, 4)), "is of layer 4, but the model has 4 layers"),
        (weights() | {"codebook": np.zeros(2, np.float32)}, "'codebook' is no hash_weight_layer"),
        (weights((1, 3)), "has no tensor hash_weight_layer_02; only layers before the first"),
        ({}, "has no tensors"),
        ({x: np.float32(1e6) * w for x, w in weights().items()}, "not finite in float16"),
        ({x: w.astype(np.int8) for x, w in weights().items()}, "has dtype int8; convert it"),
    ],
    ids=[
        "heads",
        "transposed",
        "bits",
        "mixed",
        "twice",
        "layers",
        "name",
        "gap",
        "empty",
        "large",
        "int",
    ],
)
def test_a_file_that_does_not_fit_is_refused(stored, message, tmp_path):
    save_file(stored, tmp_path / "hata.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_hata_weights(tmp_path / "hata.safetensors", SPECS)


@pytest.mark.parametrize("name", ["folder", "hash_weight_layer_02.pt"])
def test_a_pickle_is_never_opened(name, tmp_path):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match="must be one safetensors file, as a pickle runs"):
        read_hata_weights(path, SPECS)


def test_the_command_converts_a_file(tmp_path, capsys):
    specs = jspec.load_bundled()[0].config.layers
    shape = (specs[0].kv_heads, specs[0].key_size, 128)
    save_file(weights(range(2, len(specs)), shape), tmp_path / "hata.safetensors")
    arguments = ["train-hash", "--convert", str(tmp_path / "hata.safetensors")]
    assert main([*arguments, "--out", str(tmp_path / "hashes"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bits"], printed["random_layers"]) == (128, [0, 1])
    policy = jspec.policies.Hata(hashes=str(tmp_path / "hashes"))
    w = policy.prepare(jspec.load_bundled()[0], None)[2]
    expected = weights(range(2, len(specs)), shape)["hash_weight_layer_02"]
    np.testing.assert_array_equal(w, expected.astype(np.float32))
    for option in (["--compare"], ["--bits", "64"], ["--step-pairs", "9"], ["--length", "99"]):
        assert main([*arguments, "--out", "x", *option]) == 2
        assert f"{option[0]} is for hashes that are learned" in capsys.readouterr().err
