"""The FFI boundary: what a handler refuses, what cannot be loaded, and lowering for CUDA."""

import _ctypes
import ctypes
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import SamplingParams
from jspec.cuda_ffi import hashed, library, toolchain
from jspec.cuda_ffi.build import SRC, Built, build, sources
from jspec.cuda_ffi.select import Cut, workspace_words
from jspec.ops import operations
from jspec.ops.grouped import GROUPED
from jspec.ops.quantized import MXFP4, Quantized
from jspec.ops.sample import settings_of
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from jspec.ops.verify import VERIFY_GREEDY, verify_greedy
from tests.ops.laws import sampling_of


@pytest.fixture
def kernels():
    """Every library, built and registered."""
    for subject in library.TARGETS:
        if reason := library.refusal(subject):
            pytest.skip(reason)


# As xla/ffi/api/c_api.h has them.
METADATA_EXTENSION, CAPTURABLE = 1, 1


class Version(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("next", ctypes.c_void_p), ("number", ctypes.c_int * 2)]


class Metadata(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("version", Version),
        ("traits", ctypes.c_uint32),
        ("state_type", ctypes.c_int64),
    ]


class Extension(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    ]


class Frame(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(Extension)),
        ("unused", ctypes.c_int64 * 19),
    ]


def traits_of(target: str) -> int:
    """What a handler answers to XLA before its first call."""
    subject = next(name for name, targets in library.TARGETS.items() if target in targets)
    metadata = Metadata(size=ctypes.sizeof(Metadata))
    extension = Extension(
        ctypes.sizeof(Extension), METADATA_EXTENSION, None, ctypes.pointer(metadata)
    )
    frame = Frame(ctypes.sizeof(Frame), ctypes.pointer(extension))
    handler = getattr(library.loaded(subject), f"jspec_{target}")
    handler.restype = ctypes.c_void_p
    assert handler(ctypes.byref(frame)) is None
    return metadata.traits


def test_xla_captures_all_calls_but_those_that_wait_for_the_host(kernels):
    targets = {target for targets in library.TARGETS.values() for target in targets}
    captured = {target for target in targets if traits_of(target) == CAPTURABLE}
    assert targets - captured == set(library.TARGETS["host"])


def like(*shapes) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]


B, GAMMA, D, S = 2, 3, 8, 9
VERIFIED = [
    *[((B,), jnp.int32)] * 2,
    ((B,), jnp.bool_),
    ((B,), jnp.int32),
    ((B,), jnp.bool_),
    ((B, GAMMA + 1), jnp.int32),
]
TOKENS = [
    ((B, GAMMA), jnp.int32),
    ((B, GAMMA + 1), jnp.int32),
    ((B,), jnp.int32),
    ((B, 1), jnp.int32),
]
SCANNED = [VERIFIED[0], *VERIFIED[2:4]]
STATE = [((B, S), jnp.int32), ((B,), jnp.int32), ((B,), jnp.bool_)]
LARGEST = [((B, GAMMA + 1, 3), dtype) for dtype in (jnp.float32, jnp.int32)]  # of 3 parts
KV, LENGTHS = ((B, GAMMA, D), jnp.float32), ((B,), jnp.int32)
PACKED = [((B * GAMMA, D), jnp.float32), ((B,), jnp.int32), ((), jnp.int32)]
CUT = {"threads": np.int32(128), "eager": np.bool_(True), "recounts": np.bool_(False)}
# One more slot would be another chunk.
WORDS = workspace_words(130, 512, Cut(256, 256))
ROWS = [((B,), jnp.int32)] * 2
SELECT = {name: np.int32(x) for name, x in (("sinks", 0), ("recent", 0), ("highest", 128))}
HASH = [((B, 1, 4, 2), jnp.uint32), ((B, 256, 1, 2), jnp.uint32), *ROWS]
OPTIONS = ("biased", "normed", "added", "gated", "transposed")  # and not exact
GROUPED_OPTIONS = ("biased", "takes", "puts", "normed", "weighted", "gated", "clamped")
HASH_CUT = hashed.HashCut(256, 2)
HASH_WORDS = hashed.workspace_words(256, 256, HASH_CUT)
LAYER_WORDS = hashed.workspace_words(128, 20, HASH_CUT)
CHOSEN = ((B, 2, 5), jnp.int32)
LAYER_COLUMNS = [*[((B, 20, 2, 64), jnp.bfloat16)] * 2, ((B, 20, 2, 2), jnp.uint32)]
LAYER = [
    ((B, 1, 2, 4 * 64), jnp.bfloat16),
    *[((B, 1, 1, 32), jnp.float32)] * 2,
    *[((64,), jnp.float32)] * 2,
    ((2, 64, 64), jnp.float32),
    ((B, 1), jnp.int32),
    *LAYER_COLUMNS,
    *[((B,), jnp.int32)] * 2,
]
LAYER_RESULTS = [
    CHOSEN,
    *LAYER_COLUMNS,
    ((B, 1, 4, 64), jnp.bfloat16),
    ((B, 1, 4, 2), jnp.uint32),
    ((B, 2, LAYER_WORDS), jnp.uint32),
]
LAYER_OPTIONS = {
    "sinks": np.int32(0),
    "recent": np.int32(0),
    "normed": np.bool_(True),
    "q_eps": np.float32(1e-3),
    "k_eps": np.float32(1e-3),
    **HASH_CUT.attributes,
}
LAYER_ALIASES = {7: 1, 8: 2, 9: 3}
SLOTS = ((B, 1), jnp.int32)
CHUNKS = Cut(256, 256).attributes
COLUMNS = [((B, S, 3, D), jnp.float32), ((B, S, 3, 2 * D), jnp.float32)]
ROOMS = [((B, 4, 3, D), jnp.float32), ((B, 4, 3, 2 * D), jnp.float32)]
FETCHED = ((B, 3, 4), jnp.int32)
HALVES = [((B, *shape, 64), jnp.bfloat16) for shape in ((3, 4), (16, 2), (16, 2))]
ATTENDED = [*HALVES, ((B, 3), jnp.int32)]
PARTS = [((B, 2, 16, 6, size), jnp.float32) for size in (64, 2)]
RESULTS = [HALVES[0], ((B, 3, 4), jnp.float32), *PARTS]
SELECTED, TAIL = ((B, 2, 33), jnp.int32), ((B, 5), jnp.int32)
ATTENTION = {"scale": np.float32(0.1), "parts": np.int32(16), "together": np.int32(1)}
# A good call of each target: arguments, results, attributes, aliases.
CALLS = {
    "verify_greedy": (TOKENS, VERIFIED, {"warps": np.int32(1)}, None),
    "verify_tree": (
        [*TOKENS, ((B, GAMMA), jnp.int32)],
        [*VERIFIED, ((B, GAMMA), jnp.int32)],
        {},
        None,
    ),
    "acceptance_scan": (TOKENS[:2], SCANNED, {"warps": np.int32(1)}, None),
    "acceptance_scan_naive": (TOKENS[:2], SCANNED, {"warps": np.int32(1)}, None),
    "verify_and_commit": (
        [TOKENS[0], ((B, GAMMA + 1, 48), jnp.bfloat16), *TOKENS[2:], LENGTHS, *STATE],
        [*VERIFIED, ((B, GAMMA + 3), jnp.int32), *STATE, *LARGEST],
        {"warps": np.int32(2), "part": np.int32(16)},
        {5: 7, 6: 8, 7: 9},
    ),
    "pack": ([KV, LENGTHS], PACKED, CUT, None),
    "pack_path": ([*COLUMNS, *[((B, 4), jnp.int32)] * 2, LENGTHS], COLUMNS, {}, {0: 0, 1: 1}),
    "verify_and_pack": ([*TOKENS, KV], [*VERIFIED, *PACKED], CUT, None),
    "verify_and_pack_single": ([*TOKENS, KV], [*VERIFIED, *PACKED], {}, None),
    "linear": (
        [
            *[((B, 64), jnp.bfloat16), ((2, 40, 64), jnp.int8), ((2, 40), jnp.float32)],
            *(((*shape,), jnp.bfloat16) for shape in ((2, 40), (64,), (B, 40))),
        ],
        [((B, 40), jnp.float32)],
        dict.fromkeys(OPTIONS, np.bool_(True))
        | {"exact": np.bool_(False), "bits": np.int32(8), "eps": np.float32(1e-6)},
        None,
    ),
    "grouped_linear": (
        [
            *[((B, 64), jnp.bfloat16), ((3, 2, 40, 32), jnp.uint8), ((3, 2, 40, 2), jnp.uint8)],
            *[((4,), jnp.int32), ((3, 2, 40), jnp.bfloat16), *[((4,), jnp.int32)] * 2],
            *[((64,), jnp.bfloat16), ((4,), jnp.float32)],
        ],
        [((4, 40), jnp.float32)],
        dict.fromkeys(GROUPED_OPTIONS, np.bool_(True))
        | {name: np.float32(1) for name in ("eps", "limit", "alpha")},
        None,
    ),
    "linear_chain": (
        [
            *[((B, 64), jnp.bfloat16), ((2, 40, 64), jnp.int8), ((2, 40), jnp.float32)],
            *(((*shape,), jnp.bfloat16) for shape in ((2, 40), (64,), (B, 40))),
        ],
        [((B, 40), jnp.bfloat16)],
        {name: np.ones(1, np.int32) for name in ("biased", "normed", "gated")}
        | {"added": np.full(1, -1, np.int32), "eps": np.ones(1, np.float32)}
        | {"bits": np.int32(8), "exact": np.bool_(False)}
        | {name: np.zeros(1, np.int32) for name in ("summed", "scaled")}
        | {"ranks": np.int64(2), "patience": np.int64(0)},
        None,
    ),
    "select": (
        [((B, 512), jnp.int32), *ROWS],
        [SLOTS, ((B, WORDS), jnp.uint32)],
        SELECT | CHUNKS,
        None,
    ),
    "fetch_rows": (
        [*COLUMNS, *[FETCHED, *ROOMS] * 2, FETCHED],
        ROOMS,
        {"near": np.bool_(True), "ahead": np.bool_(True)},
        None,
    ),
    "fetch_ahead": ([*COLUMNS, FETCHED, KV], [*ROOMS, KV], {"near": np.bool_(False)}, {3: 2}),
    "store_rows": ([*COLUMNS, *ROOMS, ((B, 4), jnp.int32)], COLUMNS, {}, {0: 0, 1: 1}),
    "attention": (ATTENDED, RESULTS, ATTENTION, None),
    "scored_attention": (
        [*ATTENDED, ((B, 2, 64), jnp.bfloat16)],
        [*RESULTS, ((B, 2, 16), jnp.float32)],
        ATTENTION,
        None,
    ),
    "gathered_attention": (
        [*ATTENDED, SELECTED, TAIL, LENGTHS, ((B, 2), jnp.int32)],
        [HALVES[0], ((B, 3, 4), jnp.float32), *[((B, 2, 3, 6, n), jnp.float32) for n in (64, 2)]],
        {"scale": np.float32(0.1), "parts": np.int32(3), "stages": np.int32(2)}
        | {"warps": np.int32(4), "all_slots": np.bool_(False)},
        None,
    ),
    "rotate_append_attend": (
        [
            ((B, 1, 2, 4 * 64), jnp.bfloat16),
            *HALVES[1:],
            *[((B, 1), jnp.int32), SELECTED, TAIL, LENGTHS],
            *[((B, 1, 1, 32), jnp.float32)] * 2,
            *[((64,), jnp.bfloat16)] * 2,
        ],
        [
            *[((B, 1, 4, 64), jnp.bfloat16), ((B, 1, 4), jnp.float32)],
            *[((B, 2, 3, 2, n), jnp.float32) for n in (64, 2)],
            *HALVES[1:],
        ],
        {"scale": np.float32(0.1), "parts": np.int32(3), "stages": np.int32(2)}
        | {"warps": np.int32(4), "normed": np.bool_(True)}
        | {name: np.float32(1e-6) for name in ("q_eps", "k_eps")},
        {1: 4, 2: 5},
    ),
    "hash_select": (
        HASH,
        [SLOTS, ((B, HASH_WORDS), jnp.uint32)],
        {"sinks": np.int32(0), "recent": np.int32(0), **HASH_CUT.attributes},
        None,
    ),
    "hamming_scores": (
        [*HASH[:3], ((B, 256, 1), jnp.float32)],
        [((B, 1, 256), jnp.float32)],
        {"scaled": np.bool_(True)},
        None,
    ),
    "hash_encode": (
        [((B, 3, 4, 64), jnp.bfloat16), ((B, 3, 2, 64), jnp.bfloat16), ((2, 64, 64), jnp.float32)],
        [((B, 3, 4, 2), jnp.uint32), ((B, 3, 2, 2), jnp.uint32)],
        {"with_keys": np.bool_(True)},
        None,
    ),
    "hash_append_select": (LAYER, LAYER_RESULTS, LAYER_OPTIONS, LAYER_ALIASES),
    "hash_attention": (
        LAYER,
        [
            *LAYER_RESULTS[:-1],
            ((B, 2, LAYER_WORDS + 2 * 2 * 66), jnp.uint32),
            ((B, 1, 4, 64), jnp.bfloat16),
            ((B, 1, 4), jnp.float32),
        ],
        {**LAYER_OPTIONS, "tail": np.int32(1), "scale": np.float32(1e-3)},
        LAYER_ALIASES,
    ),
}


def call(target, arguments, results, attributes, aliases, prefix="jspec"):
    function = jax.ffi.ffi_call(f"{prefix}_{target}", like(*results), input_output_aliases=aliases)
    arrays = [np.zeros(shape, dtype) for shape, dtype in arguments]
    return jax.block_until_ready(jax.jit(lambda *x: function(*x, **attributes))(*arrays))


ALIASED = [target for target, call in CALLS.items() if call[3]]


def aliased(aliases, count) -> set[int]:
    """Of the buffers of a call with ``count`` arguments, those that share their memory."""
    aliases = aliases or {}
    return {*aliases, *(count + result for result in aliases.values())}


@pytest.mark.parametrize("target", CALLS)
def test_a_good_call_runs(target, kernels):
    call(target, *CALLS[target])


@pytest.mark.parametrize("target", CALLS)
def test_every_wrong_shape_and_dtype_is_an_invalid_argument(target, kernels):
    """Each argument and result in turn gets a size too many, or another dtype; what a row too many
    does is tried in `tests.cuda_ffi.test_rows`."""
    arguments, results, attributes, aliases = CALLS[target]
    both, count = [*arguments, *results], len(arguments)
    for i, (shape, dtype) in enumerate(both):
        if i in aliased(aliases, count):
            continue  # JAX itself refuses aliases of different shapes
        changes = [(shape, jnp.float16), ((*shape[:-1], shape[-1] + 1) if shape else (2,), dtype)]
        if shape in (TOKENS[3][0], CHOSEN[0], SELECTED[0], TAIL[0]):
            changes.pop()  # there may be any number of stop tokens, and of slots
        for change in changes:
            bad = [*both[:i], change, *both[i + 1 :]]
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*\["):
                call(target, bad[:count], bad[count:], attributes, aliases)


@pytest.mark.parametrize("target", CALLS)
def test_a_wrong_number_of_buffers_is_an_invalid_argument(target, kernels):
    arguments, results, attributes, _ = CALLS[target]
    message = rf"INVALID_ARGUMENT: got {len(arguments) + 1} arguments and {len(results)} results"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(target, [*arguments, LENGTHS], results, attributes, None)


@pytest.mark.parametrize(
    ("target", "change", "message"),
    [
        ("verify_greedy", {"warps": np.int32(33)}, r"warps=33 must be in 1\.\.32"),
        ("verify_and_commit", {"part": np.int32(-1)}, r"in 1\.\.32 and part=-1 at least 0"),
        ("pack", {"threads": np.int32(100)}, "threads=100 must be a multiple of 32 up to 256"),
        ("verify_greedy", {"warps": np.int64(1)}, "expected S32 but got S64"),
        ("select", {"taken": np.int32(128)}, "counted=256 and taken=128 must be powers of 2"),
        ("hash_select", {"chunk": np.int32(300)}, "chunk=300 must be a power of 2 in 256"),
        ("hash_select", {"parts": np.int32(0)}, r"parts=0 in 1\.\.1024"),
        ("hash_attention", {"tail": np.int32(0)}, "tail=0 must be"),
        ("attention", {"parts": np.int32(129)}, "129 parts and 1 .* must have .* up to 128 parts"),
        ("attention", {"together": np.int32(3)}, "3 blocks together must .* power of 2 up to 128"),
        (
            "gathered_attention",
            {"stages": np.int32(9)},
            "9 stages and 4 warps must have .* 2 to 8 stages",
        ),
        ("select", {"counted": np.int32(0)}, "counted=0 must be at least 256"),
        ("select", {"sinks": np.int32(-1)}, r"sinks=-1 and recent=0 must be \[\.\.\., k\]"),
        ("linear_chain", {"added": np.zeros(1, np.int32)}, r"added\[0\]=0 is no matmul before it"),
        (
            "linear_chain",
            {"eps": np.ones(2, np.float32)},
            "an attribute has 2 values for 1 matmuls",
        ),
        ("linear_chain", {"summed": np.ones(1, np.int32)}, "and 1 results, not 6 and 2"),
        ("linear_chain", {"scaled": np.ones(1, np.int32)}, "and 1 results, not 6 and 3"),
    ],
    ids=[
        "warps",
        "part",
        "threads",
        "wrong-type",
        "taken",
        "chunk",
        "parts",
        "tail",
        "attention-parts",
        "attention-together",
        "gathered-stages",
        "none",
        "sinks",
        "added",
        "each",
        "summed",
        "scaled",
    ],
)
def test_attributes_are_checked_and_typed(target, change, message, kernels):
    arguments, results, attributes, aliases = CALLS[target]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(target, arguments, results, attributes | change, aliases)


@pytest.mark.parametrize(("tokens", "group"), [(2, 2), (1, 9)])
def test_an_appended_token_is_alone_and_of_few_query_heads(tokens, group, kernels):
    arguments, results, attributes, aliases = CALLS["rotate_append_attend"]
    projections = ((B, tokens, 2, (group + 2) * 64), jnp.bfloat16)
    arguments = [projections, *arguments[1:3], ((B, tokens), jnp.int32), *arguments[4:]]
    with pytest.raises(jax.errors.JaxRuntimeError, match="one token a row is appended, of up to 8"):
        call("rotate_append_attend", arguments, results, attributes, aliases)


def test_a_single_block_refuses_more_than_32(kernels):
    shapes = [[((33, *shape[1:]), dtype) for shape, dtype in x] for x in (TOKENS, VERIFIED)]
    kv = ((33, GAMMA, D), jnp.float32)
    packed = [((33 * GAMMA, D), jnp.float32), ((33,), jnp.int32), ((), jnp.int32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="B=33 must be at most 32"):
        call("verify_and_pack_single", [*shapes[0], kv], [*shapes[1], *packed], {}, None)


def test_messages_survive_a_second_libstdcxx(tmp_path):
    """In a library with a libstdc++ of its own, as some compilers link it, beside that of jaxlib.

    Were its symbols shown to the process, both would share the indices of facets, but not the
    tables that these are for: no facet would write a number, or one that ends the process.
    """
    if jax.default_backend() != "cpu":
        pytest.skip("the CPU's handlers run on CPUs")
    tools, path = toolchain.find("cpu"), tmp_path / "static.so"
    options = (*toolchain.FLAGS["cpu"], "-O0", "-static-libstdc++")
    done = toolchain.run(tools.compile(options, [SRC], sources("codes", "cpu"), path))
    if done.returncode:
        pytest.skip(f"no static libstdc++: {done.stderr}")
    target = "hamming_scores"
    capsule = jax.ffi.pycapsule(getattr(ctypes.CDLL(str(path)), f"jspec_{target}"))
    jax.ffi.register_ffi_target(f"static_{target}", capsule, platform="cpu")
    arguments, results, attributes, _ = CALLS[target]
    for more, options, message in (
        ([LENGTHS], {}, "got 5 arguments and 1 results, not 4 and 1"),
        ([], {"unknown": np.int32(0)}, "Wrong number of attributes: expected 1 but got 2"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(target, [*arguments, *more], results, attributes | options, None, "static")


def test_a_library_shows_its_handlers_alone(kernels):
    for subject, targets in library.TARGETS.items():
        path = build(subject, library.PLATFORMS[jax.default_backend()]).path
        shown = subprocess.check_output(["nm", "-D", "--defined-only", path], text=True)
        names = {line.split()[-1] for line in shown.splitlines()}
        assert names >= {f"jspec_{target}" for target in targets}
        assert all(name.startswith("jspec_") for name in names), names


def fail_to_load(monkeypatch, path: Path) -> str:
    """The reason the library at ``path`` is refused for."""
    monkeypatch.setattr(library, "build", lambda subject, platform: Built(path, None))
    library._loaded.cache_clear()
    try:
        tokens = jnp.zeros((1, 2), jnp.int32)
        arguments = (tokens[:, :1], tokens, jnp.ones((1,), jnp.int32), tokens)
        reason = VERIFY_GREEDY.backend("cuda").supports(*arguments)
        # The other backends go on working.
        assert verify_greedy(*arguments).accepted == 1
        with pytest.raises(ValueError, match="verify_greedy cannot run as asked; cuda: "):
            verify_greedy(*arguments, implementation="cuda")
    finally:
        library._loaded.cache_clear()
    assert reason is not None
    return reason


def test_a_file_that_is_no_library_is_a_reason(tmp_path, monkeypatch):
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    assert f"cannot load {path}" in fail_to_load(monkeypatch, path)


def test_a_library_of_something_else_is_a_reason(monkeypatch, kernels):
    """One without the FFI's version, and one of jspec's own with other handlers."""
    for path in (Path(_ctypes.__file__), build("sample", "cpu").path):
        assert f"{path} is no library of jspec's kernels: " in fail_to_load(monkeypatch, path)


def test_a_library_for_a_newer_ffi_is_a_reason(tmp_path, monkeypatch, kernels):
    headers = tmp_path / "xla" / "ffi" / "api"
    headers.mkdir(parents=True)
    text = "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 1\n"
    (headers / "c_api.h").write_text(text)
    path = build("verify", "cpu").path
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    reason = fail_to_load(monkeypatch, path)
    assert "was built for XLA FFI 0." in reason
    assert "the running jaxlib has 0.1; delete it" in reason


def test_a_platform_without_kernels_is_a_reason():
    assert (
        library._refusal("verify", "tpu")
        == "there are kernels for NVIDIA GPUs and CPUs, not for 'tpu'"
    )


def stochastic_arguments(batch: int, vocabulary: int, *, drafted: bool) -> tuple:
    """For backends of `jspec.ops.verify_stochastic`: bfloat16 logits, 5 draft tokens a row."""
    settings = settings_of(sampling_of([SamplingParams(temperature=1.0)] * batch, range(batch)))
    tokens, logits, lengths, stops, positions, draft = like(
        ((batch, 5), jnp.int32),
        ((batch, 6, vocabulary), jnp.bfloat16),
        ((batch,), jnp.int32),
        ((batch, 1), jnp.int32),
        ((batch,), jnp.int32),
        ((batch, 5, vocabulary), jnp.bfloat16),
    )
    return tokens, logits, lengths, stops, settings, positions, draft if drafted else None


WITH_CUDA = [operation for operation in operations() if "cuda" in operation.backends]


@pytest.mark.parametrize("operation", WITH_CUDA, ids=lambda x: x.name)
def test_lowering_for_cuda(operation, kernels):
    """Every operation becomes one custom call on a GPU, also where there is none."""
    target = operation.name
    check = jax.export.DisabledSafetyCheck.custom_call(f"jspec_{target}")
    for case in operation.cases():
        if any(isinstance(x, Quantized) for x in case.arguments):
            continue  # weights of 8 bits are not for a CUDA kernel
        if operation is GROUPED and not isinstance(case.arguments[1], MXFP4):
            continue  # and those of groups in MXFP4 alone
        function = jax.jit(partial(operation.backend("cuda").run, **case.static))
        export = jax.export.export(function, platforms=["cuda"], disabled_checks=[check])
        text = export(*case.arguments).mlir_module()
        assert text.count("stablehlo.custom_call") == 1, case.name
        assert f"@jspec_{target}" in text
        assert ("output_operand_alias" in text) == (target in ALIASED)


def test_scores_that_no_histogram_holds_are_refused(kernels):
    arguments, results, attributes, _ = CALLS["hash_select"]
    large_codes = [((B, 16, 4, 2), jnp.uint32), *arguments[1:]]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scores that are not in 0\.\.4095"):
        call("hash_select", large_codes, results, attributes, None)


@pytest.mark.parametrize("drafted", [False, True], ids=["one-hot", "logits"])
def test_stochastic_verification_keeps_two_percent_of_the_logits(drafted, kernels):
    """What the compiled program needs besides its arguments and results."""
    arguments = stochastic_arguments(4, 128256, drafted=drafted)
    static = {"rule": "token", "filtered": False, "axis_name": None}
    run = partial(VERIFY_STOCHASTIC.backend("cuda").run, **static)
    needed = jax.jit(run).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    read = sum(x.size * 2 for x in (arguments[1], arguments[-1]) if x is not None)
    assert 0.005 * read < needed <= 0.02 * read
