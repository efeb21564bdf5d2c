"""Published recipes for ImageNet: the options of each experiment against the authors' files, and what augments images against
timm, which those authors use."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from compared import assert_close
from data_files import write_folder
from PIL import Image
from timm.data import Mixup, create_transform
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from timm.loss import SoftTargetCrossEntropy
from torch.nn import functional as F
from torchvision.transforms import v2

import holotrain
from holotrain.data import Digits, ImageFolder
from holotrain.data.images import IMAGENET, TimmRandAugment
from holotrain.data.sampler import EpochBatchSampler
from holotrain.tasks.schedules import cosine

DEIT = {
    "model": "deit_small", "images": 1024, "rate": 1e-3, "warmup": 5, "last rate": 1e-5, "decay": 0.05, "epochs": 300,
    "randaugment": "rand-m9-mstd0.5-inc1", "erasing": 0.25, "copies": 3, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1,
    "drop path": 0.1, "interpolation": "bicubic", "clip": None, "averaged": False,
}  # fmt: skip
"""The defaults of main.py of DeiT, whose rate is 5e-4 for 512 images. Its averaged weights are kept, and not evaluated."""

SLOWFAST = DEIT | {
    "model": "rev_vit_small", "images": 512, "rate": 5e-4, "warmup": 70, "last rate": 1e-6, "copies": 1, "clip": 1.0,
    "randaugment": "rand-m7-mstd0.5-inc1",
}  # fmt: skip
"""configs/ImageNet/REV_VIT_S.yaml of SlowFast."""

PUBLISHED = [
    DEIT,
    SLOWFAST,
    SLOWFAST | {"model": "rev_vit_base", "randaugment": "rand-m6-n5-mstd0.5-inc1", "drop path": 0.2, "decay": 0.1, "clip": 2.0},
    SLOWFAST | {"model": "rev_mvit_base", "randaugment": "rand-m9-n6-mstd0.5-inc1", "images": 256, "rate": 2.5e-4},
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each["model"])
def test_recipes_have_the_published_values(published):
    config = holotrain.compose("fit", [f"experiment=imagenet_{published['model']}", "data.root=x", "trainer.accelerator=cpu"])
    data, trainer, optimizer, epochs = config.data, config.trainer, config.optimizer, config.trainer.max_epochs
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = cosine(torch.optim.SGD([parameter], optimizer.lr), 1000, config.scheduler.warmup, config.scheduler.final)
    rates = [optimizer.lr * schedule.lr_lambdas[0](step) for step in (round(config.scheduler.warmup * 1000), 1000)]
    here = {
        "model": published["model"], "images": data.batch_size * trainer.accumulate_grad_batches, "rate": rates[0],
        "warmup": round(config.scheduler.warmup * epochs, 3), "last rate": rates[1], "decay": optimizer.weight_decay,
        "epochs": epochs, "randaugment": data.randaugment, "erasing": data.random_erasing,
        "copies": data.repeated_augmentation, "mixup": data.mixup_alpha, "cutmix": data.cutmix_alpha,
        "smoothing": config.task.label_smoothing, "drop path": config.model.arguments["drop_path"],
        "interpolation": data.interpolation, "clip": trainer.gradient_clip_val, "averaged": "ema" in config.callbacks,
    }  # fmt: skip
    assert here == pytest.approx(published)
    assert "adamw" in optimizer.target and (tuple(optimizer.betas), optimizer.eps) == ((0.9, 0.999), 1e-8)


LARGER = [
    "data.image_size=384",
    "optimizer.lr=5e-6",
    "optimizer.weight_decay=1e-8",
    "scheduler.final=1.0",
    "trainer.max_epochs=30",
]
"""What README_deit.md of DeiT gives for 384 pixels, 32 images on each of 16 GPUs; a minimum equal to the rate keeps it."""


@pytest.mark.parametrize("first", ["imagenet_deit_small", "imagenet_rev_vit_small"])
def test_larger_images_change_what_deit_changes(first):
    second = ["data.batch_size=64", "trainer.accumulate_grad_batches=8", f"scheduler.warmup={5 / 30:.7f}"]
    both, given = (["data.root=x", "trainer.accelerator=cpu"] for _ in range(2))
    both, given = [*both, f"experiment=[{first},high_resolution]"], [*given, f"experiment={first}", *LARGER, *second]
    assert holotrain.compose("fit", both) == holotrain.compose("fit", given)


@pytest.mark.slow
def test_a_training_goes_on_with_larger_and_larger_images(tmp_path):
    write_folder(tmp_path / "photos", size=64)
    small = ["model=rev_vit_tiny", "model.depth=2", "data=imagefolder", f"data.root={tmp_path / 'photos'}", "data.batch_size=2"]
    small += ["trainer.accelerator=cpu", "trainer.max_epochs=1", "trainer.accumulate_grad_batches=1", "model.patch_size=8"]
    run = holotrain.fit(overrides=[*small, "data.image_size=32", f"output_dir={tmp_path / '32'}"])
    for pixels in (48, 64):
        more = [f"data.image_size={pixels}", f"model.pretrained={run.folder}", f"output_dir={tmp_path / str(pixels)}"]
        before, run = holotrain.load(run.folder), holotrain.fit(overrides=["experiment=high_resolution", *small, *more])
        after = holotrain.load(run.folder)
        assert after.embedding.position.shape[1] == (pixels // 8) ** 2
        torch.testing.assert_close(after.head.weight, before.head.weight, rtol=0, atol=1e-3)  # kept, and trained at 5e-6


def test_the_recipe_of_revswin_has_the_values_of_its_authors():
    config = holotrain.compose("fit", ["experiment=cifar10_rev_swin", "trainer.accelerator=cpu"])
    data, optimizer, model = config.data, config.optimizer, config.model.arguments
    assert (data.batch_size, config.trainer.max_epochs, config.backward.kind) == (128, 100, "pareprop")
    assert (optimizer.lr, optimizer.weight_decay, config.scheduler.warmup, config.scheduler.final) == (1e-3, 0, 0, 0)
    assert [model[name] for name in ("dim", "depths", "heads", "patch_size", "window")] == [128, [3, 3], [8, 16], 4, 4]


@pytest.fixture
def photo():
    noise = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((160, 120), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("described", ["rand-m9-mstd0.5-inc1", "rand-m6-n5-mstd0.5-inc1"])
def test_randaugment_is_timms_and_follows_torchs_seed(described, photo):
    ours = TimmRandAugment(described, IMAGENET[0], "bicubic")
    theirs = rand_augment_transform(described, {"img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC})
    results = []
    for number in range(20):
        torch.manual_seed(number)
        seed = int(torch.randint(2**31, ()))
        random.seed(seed)
        np.random.seed(seed)
        expected = v2.functional.pil_to_tensor(theirs(photo))
        random.seed(number)  # another state, which is put back
        before = random.getstate()
        torch.manual_seed(number)
        results.append(ours(v2.functional.pil_to_tensor(photo)))
        assert torch.equal(results[-1], expected) and random.getstate() == before
    assert len({each.numpy().tobytes() for each in results}) > 15


def test_the_largest_magnitude_may_make_an_image_black(photo):
    """Pillow refuses what timm asks of it then."""
    augment, image = TimmRandAugment("rand-m10-n5-p1-inc1", IMAGENET[0], "bilinear"), v2.functional.pil_to_tensor(photo)
    torch.manual_seed(0)
    results = [augment(image) for _ in range(40)]
    assert any(each.unique().numel() == 1 for each in results)


def test_evaluation_frames_as_timm_does(tmp_path, photo):
    data = ImageFolder(str(write_folder(tmp_path, each=1, size=8)), image_size=96, interpolation="bicubic")
    theirs = create_transform(96, interpolation="bicubic", crop_pct=0.875, mean=IMAGENET[0], std=IMAGENET[1])
    difference = (data.eval_transform()(photo) - theirs(photo)).abs()
    assert difference.mean() < 0.01  # of a deviation; torchvision rounds a tensor otherwise than PIL
    other = ImageFolder(str(tmp_path), image_size=96).eval_transform()(photo)
    assert (other - theirs(photo)).abs().mean() > 3 * difference.mean()


def test_erased_rectangles_are_as_many_and_as_large_as_timms():
    (ours,), theirs = Digits(random_erasing=0.25).erased, RandomErasing(0.25, mode="pixel", device="cpu")
    torch.manual_seed(0)
    random.seed(0)
    shares = {}
    for name, erase in (("ours", ours), ("theirs", theirs)):
        shares[name] = torch.stack([(erase(torch.full((3, 40, 40), 9.0)) != 9).float().mean() for _ in range(3000)])
    erased = {name: (each > 0).float().mean() for name, each in shares.items()}
    assert_close(erased["ours"], erased["theirs"], rtol=0, atol=0.03)
    means = {name: each[each > 0].mean() for name, each in shares.items()}
    assert_close(means["ours"], means["theirs"], rtol=0, atol=0.015)


def test_repeated_samples_are_dealt_out_as_in_deit():
    size, ranks, copies = 20, 4, 3
    samplers = [EpochBatchSampler(size, 2, seed=1, shard=(rank, ranks), copies=copies) for rank in range(ranks)]
    order = [index for _, index in next(iter(EpochBatchSampler(size, size, seed=1)))]
    repeated = [(0, index, copy) for index in order for copy in range(copies)]
    for rank, sampler in enumerate(samplers):
        assert [key for batch in sampler for key in batch] == repeated[rank:size:ranks][: 2 * len(sampler)]
    assert len(samplers[0]) == len(EpochBatchSampler(size, 2, shard=(0, ranks)))


def test_copies_of_an_image_are_augmented_each_in_its_own_way():
    data = Digits(batch_size=6, repeated_augmentation=3)
    data.setup()
    (images, labels), *_ = islice(data.train_dataloader(), 1)
    assert labels.unflatten(0, (2, 3)).unique(dim=1).shape == (2, 1)
    assert len({image.numpy().tobytes() for image in images}) > 3


def test_smoothed_labels_of_mixed_images_are_timms():
    labels, outputs = torch.tensor([0, 1, 2, 1]), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    np.random.seed(0)
    _, theirs = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=3)(torch.zeros(4, 1, 2, 2), labels)
    np.random.seed(0)
    _, mixed = Mixup(mixup_alpha=0.8, label_smoothing=0.0, num_classes=3)(torch.zeros(4, 1, 2, 2), labels)
    assert_close(F.cross_entropy(outputs, mixed, label_smoothing=0.1), SoftTargetCrossEntropy()(outputs, theirs))


def test_an_augmentation_that_timm_does_not_know_is_refused():
    for described in ("rand-q9", "augmix-m5", "rand-m9x"):
        with pytest.raises(ValueError, match="randaugment must be as timm writes it"):
            TimmRandAugment(described, IMAGENET[0], "bilinear")
