"""Data: one LightningDataModule for each data set, and the loaders and transforms that they share.

image_sets    Digits, MNIST, CIFAR10, CIFAR100, Fake
image_files   ImageFolder, HubImages; decodes images that anybody may have made; what to do with one that cannot be read
images        what image data sets share: transforms, normalisation, a choice of classes
hub           what Hugging Face's datasets library reads
text          text: tokenised data sets, packed blocks and documents, batches by length for token lists of your own
tokenizers    text to token ids and back
sampler       the order of an epoch as a function of seed and epoch, and its division among processes
loader        loaders that can resume in the middle of an epoch; augmentation seeded by (seed, epoch, index); a plan's batch
"""

from holotrain.data.image_files import HubImages, ImageFolder
from holotrain.data.image_sets import CIFAR10, CIFAR100, MNIST, Digits, Fake
from holotrain.data.text.batches import BucketBatchSampler, padded_batch
from holotrain.data.text.sources import HubText, StdlibText, TextFiles

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "BucketBatchSampler",
    "Digits",
    "Fake",
    "HubImages",
    "HubText",
    "ImageFolder",
    "StdlibText",
    "TextFiles",
    "padded_batch",
]
