"""Data: one LightningDataModule for each data set, and the loaders and transforms that they share.

digits, torchvision_sets, imagefolder, hub_images, fake   the data sets of images
hub       what Hugging Face's datasets library reads
images    what image data sets share
files     image files, and what to do with one that cannot be read
augment   transforms for training and evaluation
seeded    augmentation seeded by (seed, epoch, index)
text, hub_text   text: tokenised data sets, packed blocks and documents; tokenizers
buckets   batches of samples of similar length
sampler   the order of an epoch as a function of seed and epoch
fixed     the order in which evaluation reads, split among processes
loader    loaders that can resume in the middle of an epoch, and their options
"""

from holotrain.data.digits import Digits
from holotrain.data.fake import Fake
from holotrain.data.hub_images import HubImages
from holotrain.data.hub_text import HubText
from holotrain.data.imagefolder import ImageFolder
from holotrain.data.images import ImageDataModule, image_files
from holotrain.data.loader import Loader, ResumableLoader
from holotrain.data.seeded import SeededDataset
from holotrain.data.text import StdlibText, TextDataModule, TextFiles, text_files
from holotrain.data.tokenizers import ByteTokenizer, Tokenizer, tokenizer_from_json
from holotrain.data.torchvision_sets import CIFAR10, CIFAR100, MNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "ByteTokenizer",
    "Digits",
    "Fake",
    "HubImages",
    "HubText",
    "ImageDataModule",
    "ImageFolder",
    "Loader",
    "ResumableLoader",
    "SeededDataset",
    "StdlibText",
    "TextDataModule",
    "TextFiles",
    "Tokenizer",
    "image_files",
    "text_files",
    "tokenizer_from_json",
]
