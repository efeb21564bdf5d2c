"""Causal models of transformers in chunks of their sequence, against the same models at once, with plain autograd."""

import copy
import gc
from weakref import ref

import pytest
import torch
import transformers as hf
from covering import long, slow
from happens_before import Race
from paper_gpu import Machine, Stream, paper_gpu
from peft import LoraConfig, get_peft_model
from torch import Tensor
from tracked_memory import TrackedMemory, check_plan
from transformers.loss.loss_utils import LOSS_MAPPING

from holotrain.models import GPT, RevGPT
from holotrain.models.huggingface import HuggingFace
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.planning.training_step import TrainingStep, simulate_step
from holotrain.reversible import attention_parts, chunk_weights, recompute, train_in_chunks, undo
from holotrain.reversible.chunks import ChunkedForward
from holotrain.reversible.side_stream import assuming_a_side_stream

of = hf.AutoModelForCausalLM.from_config
WORDS, TOKENS = 97, 50
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2}
OLD = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}

MODELS = {
    "Llama": lambda: hf.LlamaConfig(**GROUPED),
    "GPT-2": lambda: hf.GPT2Config(**OLD, **DRY),
    "Mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=16),
    "Qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "Qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=8),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**SMALL, attention_dropout=0.0, hidden_dropout=0.0),
    "GPT-J": lambda: hf.GPTJConfig(**OLD, rotary_dim=4, **DRY),
    "Gemma 2": lambda: hf.Gemma2Config(**GROUPED, head_dim=8, sliding_window=16, final_logit_softcapping=3.0),
    "Gemma 3": lambda: hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=16),
    "Phi-3": lambda: hf.Phi3Config(**GROUPED, pad_token_id=0),
    "OLMo 2": lambda: hf.Olmo2Config(**GROUPED),
    "Granite": lambda: hf.GraniteConfig(**GROUPED),
    "StarCoder2": lambda: hf.Starcoder2Config(**GROUPED),
    "StableLM": lambda: hf.StableLmConfig(**GROUPED),
    "Cohere": lambda: hf.CohereConfig(**GROUPED),
    "SmolLM3": lambda: hf.SmolLM3Config(**GROUPED, pad_token_id=0),
    "GLM-4": lambda: hf.Glm4Config(**GROUPED, head_dim=8, pad_token_id=0),
    "Bloom": lambda: hf.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=3, n_head=4),
    "Falcon": lambda: hf.FalconConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4),
    "OPT": lambda: hf.OPTConfig(**SMALL, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0),
}
IN_FP32 = {
    "Mixtral": lambda: hf.MixtralConfig(**GROUPED, num_local_experts=4),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**GROUPED, head_dim=8, num_experts=4, **EXPERTS),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(
        **SMALL, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, **EXPERTS, **LATENT
    ),
    "gpt-oss": lambda: hf.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4, sliding_window=16),
}
"""Mixtures, whose products of groups are not there in fp64."""

LLAMA_4 = GROUPED | {
    "head_dim": 8,
    "num_local_experts": 2,
    "intermediate_size_mlp": 32,
    "attention_chunk_size": 16,
    "pad_token_id": 0,
}

COMPUTES_IN_FP32 = {"Gemma 2", "Gemma 3", "Cohere"}


@pytest.fixture
def in_double(monkeypatch):
    """The loss of transformers casts logits to fp32; this one does not."""

    def loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **rest):
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", loss)


def made(name: str, dtype: torch.dtype = torch.float64, **options):
    torch.manual_seed(0)
    return of((MODELS | IN_FP32)[name](), **options).to(dtype).train()


def batch(tokens: int = TOKENS) -> dict[str, Tensor]:
    """With a power of two by which the loss is divided: norms in fp32 round gradients of the sum as those of the mean."""
    ids = torch.randint(WORDS, (2, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(64)}


def step(model, given: dict) -> tuple[float, Tensor]:
    """Loss, and all gradients in one row; they are taken from the model."""
    loss = model(**given).loss
    loss.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    row = torch.cat([each.flatten() for each in gradients])
    model.zero_grad()
    return loss.item(), row


def off(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def require_equal(model, given: dict, chunk: int = 16, bound: float = 1e-12, keys: str = "device", **at_once) -> None:
    loss, expected = step(model, given | at_once)
    train_in_chunks(model, chunk, keys)
    for _ in range(2):
        found, gradient = step(model, given)
        assert found == pytest.approx(loss, rel=bound) and off(gradient, expected) < bound
    undo(model)
    assert model(**given).logits is not None


@pytest.mark.parametrize("name", [*MODELS][:3] + [slow(name) for name in [*MODELS][3:]])
def test_loss_and_gradients_are_those_of_the_whole(name, in_double):
    require_equal(made(name), batch(), bound=1e-7 if name in COMPUTES_IN_FP32 else 1e-12)


ON_HOST = ["Llama", "Mistral", "GPT-2", "Gemma 3", *(slow(name) for name in ("Qwen3", "GPT-NeoX", "Phi-3", "OLMo 2", "OPT"))]


@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.parametrize("chunk", [7, 16])
def test_keys_in_main_memory(name, chunk, in_double):
    """Windows of 16 tokens begin and end within a chunk."""
    require_equal(made(name), batch(), chunk, 1e-7 if name in COMPUTES_IN_FP32 else 1e-12, "host")


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FP32)
def test_mixtures_are_those_of_the_whole(name):
    require_equal(made(name, torch.float32), batch(), bound=1e-5)


@pytest.mark.parametrize("backward", ["autograd", "checkpoint", "pareprop"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_models_of_ours(backward, positions):
    kind = RevGPT if backward == "pareprop" else GPT
    torch.manual_seed(0)
    model = kind(vocab=WORDS, context=64, dim=32, depth=3, heads=4, positions=positions, backward=backward).double().train()
    given = batch()
    tokens, targets = given["input_ids"], given["labels"]

    def gradients() -> Tensor:
        model.zero_grad()
        (model(tokens, targets) * 3).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradients()
    train_in_chunks(model, 16)
    assert off(gradients(), expected) < 1e-12
    assert model(tokens).shape == model.eval()(tokens).shape == (2, TOKENS, WORDS)
    undo(model)
    with pytest.raises(ValueError, match="keeps keys on the device"):
        train_in_chunks(model, 16, "host")


def test_the_mean_is_over_the_labels_that_count(in_double):
    given = batch()
    del given["num_items_in_batch"]
    require_equal(made("GPT-2"), given)


@pytest.mark.parametrize("chunk", [1, 7, 49, TOKENS, 64])
def test_any_length_of_a_chunk(chunk, in_double):
    require_equal(made("Llama"), batch(), chunk)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize(("side", "keys"), [("left", "device"), ("right", "device"), ("right", "host")])
def test_padding(name, side, keys, in_double):
    given = batch()
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    padded = slice(0, 20) if side == "left" else slice(30, TOKENS)
    mask[1, padded] = 0
    given["labels"][1, padded] = -100
    require_equal(made(name), given | {"attention_mask": mask}, keys=keys)


def test_hidden_tokens_that_teach_something_stay_hidden(in_double):
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 30:] = 0
    require_equal(made("Llama"), batch() | {"attention_mask": mask})


DOCUMENTS = torch.cat([torch.arange(11), torch.arange(27), torch.arange(12)])[None].expand(2, -1)


def test_documents_in_a_row_do_not_read_each_other(in_double):
    model, given = made("Llama"), batch()
    at_once = step(model, given | {"position_ids": DOCUMENTS, "use_cache": False})
    assert off(step(model, given)[1], at_once[1]) > 0.01
    require_equal(model, given | {"position_ids": DOCUMENTS, "use_cache": False})


@pytest.mark.parametrize("more", [{}, {"use_cache": False, "attention_mask": torch.ones(2, TOKENS)}])
def test_documents_read_each_other_where_they_do_at_once(more, in_double):
    """transformers separates them where it gets neither a cache nor a mask."""
    require_equal(made("Llama"), batch() | {"position_ids": DOCUMENTS} | more)


@pytest.mark.parametrize(("name", "attention"), [("Mistral", "sdpa"), ("Llama", "eager")])
def test_documents_are_refused_where_their_mask_would_be_taken_for_another(name, attention):
    model = train_in_chunks(made(name, torch.float32, attn_implementation=attention), 16)
    with pytest.raises(ValueError, match="several documents in a row"):
        model(**batch(), position_ids=DOCUMENTS, use_cache=False)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_depends_on_the_length_is_refused(kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config = hf.LlamaConfig(**GROUPED, max_position_embeddings=32, rope_parameters=rope)
    model = train_in_chunks(of(config).train(), 16)
    assert model(**batch(30)).loss.isfinite()
    with pytest.raises(ValueError, match=f"{kind}.* depends on the length"):
        model(**batch())


def test_dropout_is_drawn_alike_again(in_double):
    """Against the chunks with one graph, in an ordinary cache."""
    options = OLD | {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    torch.manual_seed(0)
    model = of(hf.GPT2Config(**options), attn_implementation="eager").double().train()
    given, cache, losses = batch(), hf.DynamicCache(), []
    labels = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    torch.manual_seed(3)
    for start in range(0, TOKENS, 16):
        part = labels[:, start : start + 16].contiguous()
        result = model(given["input_ids"][:, start : start + 16], cache, labels=part, shift_labels=part, num_items_in_batch=1)
        losses.append(result.loss)
    loss = sum(losses) / 64
    loss.backward()
    expected, after = torch.cat([p.grad.flatten() for p in model.parameters()]), torch.rand(())
    model.zero_grad()
    train_in_chunks(model, 16)
    model(**given)  # the first call is looked at
    torch.manual_seed(3)
    found, gradient = step(model, given)
    assert found == pytest.approx(loss.item(), rel=1e-12) and off(gradient, expected) < 1e-12
    assert torch.rand(()) == after


def test_adapters_over_a_frozen_base(in_double):
    model = get_peft_model(made("Llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    model.double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    require_equal(model, batch())
    assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)


@pytest.mark.parametrize("keys", ["device", "host"])
@pytest.mark.parametrize("backward", ["checkpoint", "chunks"])
def test_blocks_may_run_again_within_a_chunk(backward, keys, in_double):
    model, given = made("Llama"), batch()
    loss, expected = step(model, given)
    recompute(model, "model.layers", backward=backward, chunk=16, keys=keys)
    found, gradient = step(model, given)
    assert found == pytest.approx(loss, rel=1e-12) and off(gradient, expected) < 1e-12


def test_tiles_may_be_changed_later(in_double):
    model, given = made("Llama"), batch()
    expected = step(model, given)[1]
    for options in ({"tile": 8, "chunk": 16}, {"tile": 4}):
        assert off(step(recompute(model, "model.layers", **options), given)[1], expected) < 1e-12


def test_gradients_of_two_batches_are_added_and_each_parameter_gets_one_of_each(in_double):
    model, first, second = made("Llama"), batch(), batch(33)
    expected = step(model, first)[1] + 4 * step(model, second)[1]
    train_in_chunks(model, 16)
    calls = []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(calls.append)
    model(**first).loss.backward()
    (4 * model(**second).loss).backward()
    assert off(torch.cat([p.grad.flatten() for p in model.parameters()]), expected) < 1e-12
    assert len(calls) == 2 * len([*model.parameters()])


@pytest.mark.parametrize("keys", ["device", "host"])
@pytest.mark.parametrize("whole", [False, True])
def test_half_precision_is_as_exact_as_at_once(whole, keys):
    """``whole``: the model is in bf16; else autocast casts."""
    exact, given = made("Llama", torch.float32), batch(400)
    expected = step(exact, given)[1]
    model = copy.deepcopy(exact).to(torch.bfloat16) if whole else exact

    def error() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
            return off(step(model, given)[1].float(), expected)

    at_once = error()
    train_in_chunks(model, 16, keys)
    assert 0 < error() < 1.2 * at_once


def test_what_grows_with_the_sequence_is_keys_values_and_their_gradients():
    """Of 3 layers, 2 of 4 heads of 8 numbers, in fp32; and the mask and the tokens themselves."""

    def peak(tokens: int) -> int:
        model = train_in_chunks(made("Llama", torch.float32), 64)
        given = {"input_ids": torch.randint(WORDS, (1, tokens))}
        given["labels"] = given["input_ids"]
        step(model, given)
        model(**given).loss.backward()  # gradients are there
        with TrackedMemory(model) as memory:
            model(**given).loss.backward()
        return memory.peak

    grows = (peak(2048) - peak(1024)) / 1024
    kept = 2 * 2 * 3 * 2 * 8 * 4
    mask = 2 * 64 * 4
    assert kept <= grows < kept + 2 * mask + 64


@pytest.mark.slow
@pytest.mark.parametrize(("backward", "tile"), [("chunks", None), ("checkpoint", 64)])
def test_a_step_takes_what_is_planned(backward, tile):
    ids = torch.arange(1024)[None] % WORDS

    def step_of(model) -> TrainingStep:
        recompute(model, backward=backward, chunk=256, tile=tile)
        optimizer = torch.optim.AdamW(model.parameters())
        return TrainingStep(model, lambda: model(input_ids=ids, labels=ids).loss, optimizer, held={"batch": [ids]})

    with fake_tensors():
        planned = simulate_step(step_of(fake_parameters(of(MODELS["Llama"]()), torch.device("cpu")).train()))
    check_plan(planned, step_of(made("Llama", torch.float32)))


def test_windows_read_their_window_alone(monkeypatch):
    read, model, given = [], made("Mistral", torch.float32), batch()
    step(train_in_chunks(model, 10), given)

    def attention(query, key, *rest, sdpa=torch.nn.functional.scaled_dot_product_attention, **more):
        read.append(key.shape[2])
        return sdpa(query, key, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    step(model, given)
    assert set(read) == {10, 20, 25}  # a window of 16 tokens


def on_paper(name: str, tokens: int, machine: Machine) -> tuple[list[Tensor], int]:
    """Gradients of a step with keys in main memory, and the most bytes on the device above ids and labels."""
    gc.collect()
    model, ids = made(name, torch.float32).to("cuda"), (torch.arange(tokens)[None] % WORDS).to("cuda")
    given = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(64).to("cuda")}
    recompute(model, backward="chunks", chunk=32, keys="host")
    model(**given).loss.backward()  # the first call compares
    model.zero_grad()
    machine.waits.clear()
    peak, end = 0, machine.end

    def count(*work) -> None:
        nonlocal peak
        end(*work)
        peak = max(peak, sum(memory.size for memory in machine.memories if memory.device == "cuda"))

    machine.end = count
    model(**given).loss.backward()
    machine.end = end
    assert not machine.waits
    return [parameter.grad.cpu() for parameter in model.parameters()], peak - 2 * 8 * tokens


@pytest.mark.parametrize("name", ["Llama", long("Mistral")])
def test_the_memory_of_a_gpu_on_paper_does_not_grow(name, monkeypatch):
    """Keys come ahead of their turn, on a stream of their own, and the host waits for nothing."""
    model = made(name, torch.float32)
    ids = torch.arange(160)[None] % WORDS
    expected = step(model, {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(64)})[1]
    with paper_gpu(monkeypatch) as machine:
        gradients, peak = on_paper(name, 160, machine)
        assert {stream for operation, stream in machine.log if operation == "aten.copy_"} >= {"side stream 1"}
        longer = on_paper(name, 256, machine)[1]
    assert off(torch.cat([each.flatten() for each in gradients]), expected) < 1e-6
    assert 0 <= longer - peak < 64  # an odd label


@pytest.mark.parametrize("method", ["wait_stream", "wait_event"])
def test_a_wait_that_is_left_out_is_found(method, monkeypatch):
    with paper_gpu(monkeypatch) as machine, pytest.raises((Race, ValueError), match="side stream 1"):
        monkeypatch.setattr(Stream, method, lambda *_: None)
        on_paper("Llama", 96, machine)


def test_a_plan_for_a_gpu_counts_no_keys_in_main_memory():
    def planned(tokens: int) -> int:
        with assuming_a_side_stream(), fake_tensors():
            model = fake_parameters(of(MODELS["Llama"]()), torch.device("cpu")).train()
            ids = torch.zeros(1, tokens, dtype=torch.long)
            train_in_chunks(model, 128, "host")
            loss = lambda: model(input_ids=ids, labels=ids).loss  # noqa: E731
            return simulate_step(TrainingStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))).peak

    assert 0 <= planned(768) - planned(512) <= 3 * 8 * 256


def test_a_chunk_hides_its_copies_behind_attention():
    model = train_in_chunks(made("Llama"), keys="host")
    assert ChunkedForward.of(model).chunk == 8192 // 2
    assert ChunkedForward.of(train_in_chunks(model)).chunk == 1024


def test_a_model_that_fit_builds(tmp_path):
    """It gets the targets of each token, and returns the loss itself."""
    hf.LlamaConfig(**GROUPED).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = HuggingFace(str(tmp_path), "causal_lm", vocab=WORDS).train()
    ids = batch()["input_ids"]
    targets = ids.roll(-1, 1)
    targets[1, 30:] = -100

    def gradients() -> Tensor:
        model.zero_grad()
        model(ids, targets).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradients()
    train_in_chunks(model, 16)
    assert off(gradients(), expected) < 1e-5


def test_a_second_backward_and_no_labels():
    model, given = train_in_chunks(made("Llama", torch.float32), 16), batch()
    assert model(input_ids=given["input_ids"]).logits.shape == (2, TOKENS, WORDS)
    result = model(**given)
    assert result.logits is None
    result.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        result.loss.backward()
    with torch.no_grad():
        assert model(**given).logits is not None
    assert model.eval()(**given).logits is not None


class TwoWays(torch.nn.Module):
    """What reads the tokens behind, too."""

    def __init__(self, own) -> None:
        super().__init__()
        self.own = own

    def forward(self, x):
        return self.own(x) + 0.1 * x.mean(1, keepdim=True)


def bidirectional(dtype: torch.dtype = torch.float32):
    model = made("Llama", dtype)
    model.model.layers[1].mlp = TwoWays(model.model.layers[1].mlp)
    return model


def steered():
    model, direction = made("Llama", torch.float32), torch.nn.Parameter(torch.ones(32))
    model.model.layers[1].register_forward_hook(lambda module, given, result: result + direction)
    return model


REFUSED = {
    "mamba": (lambda: of(hf.MambaConfig(**SMALL)), {}, "cache of keys and values alone"),
    "jamba": (lambda: of(hf.JambaConfig(**GROUPED, use_mamba_kernels=False)), {}, "cache"),
    "what reads tokens behind": (bidirectional, {}, "something else in chunks than at once"),
    "what does so in bf16": (lambda: bidirectional(torch.bfloat16), {}, "reads later tokens"),
    "a tensor of a hook": (steered, {}, "none of its parameters"),
    "types of tokens": (lambda: made("Llama", torch.float32), {"token_type_ids": torch.ones(2, TOKENS)}, "token_type_ids"),
    "too many labels": (lambda: made("Llama", torch.float32), {"shift_labels": torch.ones(2, 60).long()}, r"\(2, 60\)"),
    "padding on the left, in eager": (
        lambda: made("Llama", torch.float32, attn_implementation="eager"),
        {"attention_mask": torch.arange(TOKENS).expand(2, -1) > 3},
        "padding on the left",
    ),
    "a tuple": (lambda: made("Llama", torch.float32), {"return_dict": False}, "return_dict=False"),
    "embeddings": (lambda: made("Llama", torch.float32), {"inputs_embeds": torch.zeros(2, TOKENS, 32)}, "inputs_embeds"),
    "a whole mask": (
        lambda: made("Llama", torch.float32),
        {"attention_mask": torch.ones(2, 1, TOKENS, TOKENS)},
        r"attention_mask of \(B, T\)",
    ),
    "a router's loss": (
        lambda: of(hf.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True)),
        {},
        "output_router_logits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_no_chunks_says_so(name):
    make, given, words = REFUSED[name]
    model = train_in_chunks(make().train(), 16)
    with pytest.raises(ValueError, match=words):
        model(**batch(), **given)
    undo(model)


ONLY_ON_DEVICE = {
    "attention of its own": (lambda: made("Gemma 2", torch.float32), {}, "attn_implementation='sdpa'"),
    "code of its own": (lambda: made("Bloom", torch.float32), {}, "attn_implementation='sdpa'"),
    "padding on the left": (
        lambda: made("Llama", torch.float32),
        {"attention_mask": (torch.arange(TOKENS) > 3).expand(2, -1)},
        "padding on the left",
    ),
    "documents": (lambda: made("Llama", torch.float32), {"position_ids": DOCUMENTS, "use_cache": False}, "documents in a row"),
    "dropout": (
        lambda: of(hf.GPT2Config(**OLD, **DRY | {"attn_pdrop": 0.1})),
        {},
        "GPT2Attention drops out attention",
    ),
    "latent keys": (lambda: made("DeepSeek-V3", torch.float32), {}, "reads something else than what its layer's cache keeps"),
    "windows that do not slide": (lambda: of(hf.Llama4TextConfig(**LLAMA_4)), {}, "windows that do not slide"),
}


@pytest.mark.parametrize("name", ONLY_ON_DEVICE)
def test_what_keeps_its_keys_on_the_device_says_so(name):
    make, given, words = ONLY_ON_DEVICE[name]
    model = train_in_chunks(make().train(), 16, "host")
    with pytest.raises(ValueError, match=words):
        model(**batch(), **given)
    train_in_chunks(model, 16)(**batch(), **given)


def test_where_keys_are():
    with pytest.raises(ValueError, match="keys must be 'device' or 'host', not 'disk'"):
        train_in_chunks(made("Llama"), keys="disk")
    with pytest.raises(ValueError, match="keys='host' is for chunks"):
        recompute(made("Llama"), keys="host")


def test_a_first_row_of_one_token_proves_nothing():
    model = train_in_chunks(bidirectional(), 16)
    model(**{name: value[:, :1] if value.ndim else value for name, value in batch().items()})
    with pytest.raises(ValueError, match="something else in chunks"):
        model(**batch())


def test_a_model_that_trains_nothing_is_taken_whole():
    model = train_in_chunks(made("Llama", torch.float32).requires_grad_(False), 16)
    assert model(**batch()).logits is not None


def test_nothing_of_a_step_stays(monkeypatch):
    """Sums of gradients would stay, in circles that Python's collector does not see."""
    kept = []
    own = chunk_weights.Weights.__init__
    monkeypatch.setattr(chunk_weights.Weights, "__init__", lambda self, *given: kept.append(ref(self)) or own(self, *given))
    model = train_in_chunks(made("Llama", torch.float32), 16)
    step(model, batch())
    refused = train_in_chunks(steered(), 16)
    with pytest.raises(ValueError, match="none of its parameters"):
        refused(**batch())
    gc.collect()
    assert len(kept) == 2 and [each() for each in kept] == [None, None]
    assert attention_parts._latest == {}


@pytest.mark.parametrize("kind", ["Llama", "GPT-2"])
def test_chunks_are_in_place_of_the_checkpoints_of_transformers(kind):
    """Which would turn the cache off."""
    model, plain = train_in_chunks(made(kind, torch.float32), 16), made(kind, torch.float32)
    model.gradient_checkpointing_enable()
    for each in (model, plain):
        each(**batch()).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert model.is_gradient_checkpointing


def test_what_peft_asks_of_embeddings_for_checkpoints_is_left_out():
    model, given = get_peft_model(made("Llama", torch.float32), LoraConfig(init_lora_weights=False)), batch()
    expected = step(model, given)[1]
    train_in_chunks(model, 16)
    model.enable_input_require_grads()
    assert off(step(model, given)[1], expected) < 1e-5
    undo(model)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda *given: seen.append(given[-1].requires_grad))
    model(**given)
    assert seen == [True]


def test_what_is_no_causal_language_model():
    with pytest.raises(ValueError, match="no causal language model"):
        train_in_chunks(torch.nn.Linear(2, 2))
    config = hf.T5Config(vocab_size=WORDS, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match="no causal language model"):
        train_in_chunks(hf.T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="chunk must be a number of tokens"):
        train_in_chunks(made("Llama"), 0)
