"""Models of timm and transformers from the command line: what is taken over of published weights, mistakes, and memory."""

from functools import partial
from pathlib import Path

import pytest
import torch
from compared import assert_equal
from covering import slow
from foreign_models import SHORT, TEXT, TINY, trained_once, write_network, write_texts

import holotrain as package
from holotrain.models import HuggingFace, Timm, generate
from holotrain.models.generation import Sampling

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def trained(tmp_path_factory):
    return partial(trained_once, tmp_path_factory)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_generated_tokens_are_those_of_the_whole_context(tmp_path, kind):
    write_network(tmp_path, kind)
    model = HuggingFace(str(tmp_path), "causal_lm").eval()
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9])]
    tokens = torch.stack(list(generate(model, prompts, 5, Sampling(temperature=0))), dim=1)
    for prompt, row in zip(prompts, tokens, strict=True):
        text = prompt
        for token in row:
            assert model(text[None])[0, -1].argmax() == token
            text = torch.cat((text, token[None]))


def test_images_of_another_size_and_number_of_classes(tmp_path, capsys):
    write_network(tmp_path / "vit", "vit")
    large = HuggingFace(str(tmp_path / "vit"), "image_classification", classes=3, image_size=32, channels=3)
    large.model.save_pretrained(tmp_path / "vit")
    small = HuggingFace(str(tmp_path / "vit"), "image_classification", classes=5, image_size=16, channels=3)
    said = small.start_from(None)
    assert "of another size, fitted: vit.embeddings.position_embeddings" in said and "new, random: classifier.bias" in said
    assert_equal(small.model.vit.layernorm.weight, large.model.vit.layernorm.weight)
    sizes = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 4}
    big = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, **sizes)
    torch.save(big.state_dict(), tmp_path / "big.pth")
    little = Timm("vit_tiny_patch16_224", classes=5, image_size=16, channels=1, arguments=sizes)
    said = little.start_from(str(tmp_path / "big.pth"))
    assert said.endswith("new, random: head.bias, head.weight; of another size, fitted: pos_embed")
    assert_equal(little.model.blocks[0].attn.qkv.weight, big.blocks[0].attn.qkv.weight)
    with pytest.raises(ValueError, match="do not fit"):
        little.start_from(str(tmp_path / "vit"))
    convolutions = Timm("resnet10t", classes=4, image_size=24)
    assert convolutions(torch.randn(2, 3, 24, 24)).shape == (2, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=timm"], "model.name: a value is needed"),
        (["model=timm", "model.name=swin_tinny_patch4_window7_224"], "such as swin_tiny_patch4_window7_224"),
        ([*TINY[:2], "model.arguments={checkpoint_path: x}"], "arguments.checkpoint_path is not passed to timm"),
        slow([*TINY, "task=causal_lm", *TEXT], "model: CausalLM trains GPT or HuggingFace, not Timm"),
        ([*TINY, "backward=reversible"], "Timm has no reversible blocks; only autograd, checkpoint, compiled,"),
        slow([*TINY, "model.adapters=64"], "model.adapters: a int is no configuration of peft, such as peft.LoraConfig"),
        (["model=huggingface", "model.name=someone/something"], "model.download=true downloads one from the Hub"),
        slow(["model=huggingface", "model.name=vit", "task=causal_lm", *TEXT], "no AutoModelForCausalLM of type vit"),
        slow(["model=huggingface", "model.name=code"], "model.name: the configuration of code names a class by _target_"),
        (["model=huggingface", "model.name=kernel"], "attn_implementation: 'someone/kernel' is not one of eager"),
        (
            ["model=huggingface", "model.name=gpt2", "task=causal_lm", *TEXT, "data.context=64"],
            "model: it reads at most 32 tokens, not 64; use data.context=32",
        ),
    ],
)
def test_a_mistake_is_one_line(holotrain, tmp_path, words, said):
    write_texts(tmp_path)
    for kind in ("vit", "gpt2"):
        write_network(Path(kind), kind)
    write_network(Path("strange"), "vit", model_type="strange", auto_map={"AutoConfig": "evil.Config"})
    write_network(Path("code"), "vit", more=[{"_target_": "os.system", "command": "true"}])
    write_network(Path("kernel"), "vit", text={"_attn_implementation": "someone/kernel"})
    assert said in holotrain.refused("fit", *SHORT, *words)


def test_the_weights_of_a_checkpoint_of_an_older_version_load(holotrain, trained):
    """Its configuration has two options more, with which it is not continued."""
    run = trained("gpt2", "causal_lm")
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    entry = checkpoint["holotrain"]
    for options in (entry["config"]["model"], entry["description"]["arguments"]):
        options |= {"reversible": "4bit", "blocks": None}
    torch.save(checkpoint, "old.ckpt")
    said = holotrain.refused("test", "ckpt_path=old.ckpt")
    assert f"another version of holotrain ({package.__version__}): model.reversible: " in said
    assert said.endswith("resume it with that version, or load its weights with model.pretrained=old.ckpt\n")
    assert_equal(package.load("old.ckpt").state_dict(), package.load(run / "checkpoints/last.ckpt").state_dict())
