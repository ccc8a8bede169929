"""Hashes on disk: what is written is read, and everything else is refused."""

import json
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import CheckpointError, LayerSpec, load_hashes
from jspec.models.bundled import bundled_path
from jspec.models.hashes import check_hashes, check_model, embedding_sample, save_hashes


def made(bits=32):
    rng = np.random.default_rng(0)
    first, last = (rng.standard_normal((2, 8, bits), np.float32) for _ in range(2))
    return first, None, last


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("hashes") / "written"
    save_hashes(made(), path, {"seed": 0})
    return path


@pytest.fixture
def path(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


def test_round_trip_is_float16(path):
    first, middle, last = load_hashes(path)
    assert middle is None
    for got, expected in ((first, made()[0]), (last, made()[2])):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected.astype(np.float16).astype(np.float32))
    with pytest.raises(CheckpointError, match="exists; choose another path"):
        save_hashes(made(), path, {})


def test_hashes_of_different_bits_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"of \[32, 64\] bits must all have as many"):
        save_hashes((made()[0], made(64)[0]), tmp_path / "new", {})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format=2 is unknown; jspec has 1"),
        ({"format": True}, "format=True is unknown"),
        ({"embedding": [1.0, "x"]}, r"embedding=.* must be at most 256 finite numbers"),
        ({"centred": True}, r"fields \['centred'\] are unknown; the file is of a newer jspec"),
        ({"bits": 31}, "bits=31 must be one of 32, 64, 128, 256"),
        ({"bits": "32"}, "bits='32' must be a positive integer"),
        ({"layers": []}, r"layers=\[\] must be a list of 1 to 1024 layers"),
        ({"layers": [[2, 8], None, [2, 0]]}, "must hold .KV heads, key size. or null"),
        ({"layers": [None, None, None]}, "or null, not null alone"),
        ({"layers": [[2, 8], None, [2, 16]]}, r"'layers.2' has shape \(2, 8, 32\)"),
        ({"layers": [[2, 8], [2, 8], [2, 8]]}, r"'layers.1' has shape none \(it is missing\)"),
        ({"bits": 64}, r"hashes.json asks for \(2, 8, 64\)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(path, change, message):
    file = path / "hashes.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_hashes(path)


def test_a_folder_without_hashes_is_refused(path):
    with pytest.raises(CheckpointError, match="the folder has no hashes; `jspec train-hash --out`"):
        load_hashes(path.parent)
    shutil.rmtree(path / "arrays")
    with pytest.raises(CheckpointError, match="arrays"):
        load_hashes(path)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([LayerSpec(2, 8, 8)] * 2, "of 3 layers do not fit a model of 2"),
        ([LayerSpec(2, 8, 8)] * 3, "layer 1 has no hashes and no sliding window"),
        (
            [LayerSpec(2, 8, 8), LayerSpec(2, 8, 8, window=4), LayerSpec(4, 8, 8)],
            "of layer 2 are for 2 KV heads of size 8, but the model has 4 of size 8",
        ),
    ],
)
def test_hashes_of_another_model_are_refused(specs, message):
    with pytest.raises(ValueError, match=message):
        check_hashes(made(), specs)
    check_hashes(made(), [LayerSpec(2, 8, 8), LayerSpec(2, 8, 8, window=4), LayerSpec(2, 8, 8)])


def test_the_bundled_model_has_hashes():
    model, _ = jspec.load_bundled()
    hashes = load_hashes()
    check_hashes(hashes, model.config.layers)
    # Learned: their columns have length 1, which random ones have not.
    for w in hashes:
        assert w is not None
        np.testing.assert_allclose(np.linalg.norm(w, axis=1), 1, rtol=1e-3)


def test_the_card_of_the_bundled_model_has_the_figures_of_its_report():
    card = (bundled_path() / "MODEL_CARD.md").read_text()
    report = json.loads((bundled_path() / "hashes" / "report.json").read_text())
    for row in report["methods"]:
        pairs = zip(row["recall"], row["mass"], strict=True)
        figures = [f"{x:.3f}" for pair in pairs for x in pair]
        assert f"| {row['name']} | {row['bytes']:g} | {' | '.join(figures)} |" in card
    assert f"{report['pairs']:,} pairs of {report['texts']} texts" in card


def test_the_weights_tell_models_apart(tmp_path):
    def model(seed):
        rng = np.random.default_rng(seed)
        return SimpleNamespace(embedding=jnp.asarray(rng.standard_normal((300, 24)), jnp.bfloat16))

    one, other = model(0), model(1)
    save_hashes(made(), tmp_path / "hashes", {}, one)
    assert len(load_hashes(tmp_path / "hashes")) == 3
    # In another precision, fine-tuned a little, or with a padded vocabulary it is the same model.
    table = np.asarray(one.embedding, np.float32)
    noise = 0.1 * np.random.default_rng(2).standard_normal(table.shape)
    for same in (table, table + noise, np.pad(table, ((0, 20), (0, 0)))):
        check_model(tmp_path / "hashes", SimpleNamespace(embedding=same))
    with pytest.raises(ValueError, match=r"are of another model: the cosine .* is -?0\.[01]"):
        check_model(tmp_path / "hashes", other)
    with pytest.raises(ValueError, match="are of another model"):
        check_model(tmp_path / "hashes", SimpleNamespace(embedding=table[:20]))
    # What has no embedding cannot be compared, nor hashes that were stored without a sample.
    check_model(tmp_path / "hashes", SimpleNamespace())
    save_hashes(made(), tmp_path / "plain", {})
    check_model(tmp_path / "plain", one)
    assert embedding_sample(jspec.load_bundled()[0]) is not None
