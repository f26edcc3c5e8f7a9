"""The inference server's model in torch on the CPU: all kinds of passes give the same tokens."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-integrations")

EXAMPLE = Path(__file__).parents[3] / "examples" / "09_inference_server"
SIZES = {"slots": 8, "context": 64, "decode_sizes": (4, 8), "prefill_sizes": (16, 48)}
TINY = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_size": 8, "mlp": 64,
    "vocabulary": 97, **SIZES,
}  # fmt: skip
SEED = random.Random(1)
PROMPTS = [[SEED.randrange(90) for _ in range(length)] for length in (5, 17, 30)]


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    """Load the example's module; its modules have plain names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        found = importlib.import_module("model")
        found.Piece = importlib.import_module("batch").Piece  # type: ignore[attr-defined]
        yield found
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in ("model", "products", "batch"):
            del sys.modules[name]


def passes_agree(made: Any, module: ModuleType) -> None:
    """Check decode steps and fused chunks against reading the whole text for each token."""
    piece, batch = module.Piece, module.Batch
    graphs, fused = made.all_graphs(), made.fused_graphs(16)

    def anew(prompt: list[int], tokens: int) -> list[int]:
        found: list[int] = []
        for _ in range(tokens):
            found += graphs.compute(batch(pieces=[piece(7, prompt + found, 0, True)]))
        return found

    expected = [anew(prompt, 6) for prompt in PROMPTS]
    assert len({tuple(found) for found in expected}) == len(expected)
    answers = [
        graphs.compute(batch(pieces=[piece(slot, prompt, 0, True)]))
        for slot, prompt in enumerate(PROMPTS)
    ]
    for _ in range(5):
        for answer, token in zip(answers, graphs.compute(batch([0, 1, 2])), strict=True):
            answer.append(token)
    assert answers == expected

    # One decodes; of the others, the end of one and the begin of the next are in one pass.
    _, middle, long = PROMPTS
    first = graphs.compute(batch(pieces=[piece(3, PROMPTS[0], 0, True)]))
    first += fused.compute(batch([3], [piece(4, middle[:10], 0, False)]))
    tokens = fused.compute(
        batch([3], [piece(4, middle[10:], 10, True), piece(5, long[:3], 0, False)])
    )
    first, second = [*first, tokens[0]], [tokens[1]]
    for start, end in ((3, 11), (11, 19), (19, 27)):
        tokens = fused.compute(batch([3, 4], [piece(5, long[start:end], start, False)]))
        first, second = [*first, tokens[0]], [*second, tokens[1]]
    third = fused.compute(batch([3, 4], [piece(5, long[27:], 27, True)]))[2:]
    assert (first, second) == (expected[0], expected[1][:4])
    assert third == expected[2][:1]


def test_passes_of_all_kinds_agree(model: ModuleType) -> None:
    """Slots, chunks and padding change no token."""
    passes_agree(model.load(device="cpu", **TINY), model)


def test_a_temperature_draws_tokens(model: ModuleType) -> None:
    """At temperature 0 the token is always the same; above, tokens differ."""
    graphs = model.load(device="cpu", **TINY).all_graphs()
    kinds = {}
    for temperature in (0.0, 5.0):
        drawn = set()
        for _ in range(10):
            piece = model.Piece(0, PROMPTS[0], 0, True, temperature)
            drawn.add(
                (*graphs.compute(model.Batch(pieces=[piece])), *graphs.compute(model.Batch([0])))
            )
        kinds[temperature] = len(drawn)
    assert kinds[0.0] == 1
    assert kinds[5.0] > 2


def save(folder: Path, kind: str, **more: Any) -> str:
    """Save a tiny transformers model with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=64, vocab_size=97, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_model_of_hugging_face_is_served(model: ModuleType, kind: str, tmp_path: Path) -> None:
    """Its layers attend to the slots, with the weights of its folder."""
    name = save(tmp_path, kind)
    made = model.load(name, device="cpu", **SIZES)
    passes_agree(made, model)
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64).eval()
    with torch.inference_mode():
        logits = own(torch.tensor([PROMPTS[2]])).logits
    found = made.all_graphs().compute(model.Batch(pieces=[model.Piece(0, PROMPTS[2], 0, True)]))
    assert found == [int(logits[0, -1].argmax())]


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        ("gemma2", {}, "softcap"),
        ("mistral", {"sliding_window": 8}, "sliding_window"),
    ],
)
def test_an_attention_of_another_kind_is_refused(
    model: ModuleType, kind: str, more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """The error names what the engine would ignore."""
    made = model.load(save(tmp_path, kind, **more), device="cpu", **SIZES)
    with pytest.raises(ValueError, match=named):
        made.all_graphs().compute(model.Batch(pieces=[model.Piece(0, [1, 2], 0, True)]))


def test_a_product_has_the_sm_count_with_which_it_was_fastest(
    model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product is measured once, and other functions keep the GPU's count."""
    products = sys.modules["products"]
    told, measured = [0], list[int]()
    fastest = {(4, 4): 104, (8, 4): 0}
    weights = {size: torch.ones(size) for size in fastest}
    x, into = torch.ones(2, 4), torch.zeros(2, 4)

    def median_time(call: Any) -> float:
        measured.append(told[-1])
        return 1.0 + abs(told[-1] - fastest[tuple(call.args[1].shape)])

    monkeypatch.setattr(products, "set_sm_count", told.append)
    monkeypatch.setattr(products, "median_time", median_time)
    monkeypatch.setattr(products, "gpu_sm_count", lambda _: 132)
    monkeypatch.setattr(products.gs_torch, "sm_count", lambda: 116)
    with products.FastestProducts():
        for _ in range(2):
            told.append(-1)
            assert torch.nn.functional.linear(x, weights[4, 4]).tolist() == [[4.0] * 4] * 2
            assert told[-2:] == [104, 0]
            assert torch.nn.functional.linear(x, weights[8, 4]).shape == (2, 8)
            assert told[-2:] == [0, 0]
            told.append(-1)
            torch.exp(x)
            assert told[-1] == -1
        assert measured == [0, 116, *range(88, 133, 8)] * 2
        assert torch.nn.Linear(4, 8, bias=False)(x).shape == (2, 8), "its bias is None"
        assert told[-2:] == [0, 0]
        fastest[2, 4] = 88
        into.addmm_(x, weights[4, 4])
    assert into.tolist() == [[4.0] * 4] * 2
