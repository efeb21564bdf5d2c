"""Wrong command lines: what is typed after ``holotrain``, split as a shell splits it, and what the answer must say.

They are typed in a folder with a finished training in ``run``, a file ``occupied``, a file ``text.ckpt`` that is no checkpoint,
a folder ``empty`` and a pipe ``pipe.ckpt``, to which nobody writes; folders ``full`` and ``texts``; files ``empty.txt``,
``latin.txt`` and ``broken.jsonl``, which are no texts; and the package and options of ``own_classes``, in ``mine``.
"""

LONG = "a" * 300

PLANNED = (
    "data=fake data.image_size=16 data.train_size=128 data.val_size=64 data.test_size=64 data.batch_size=64 "
    "model.dim=24 model.depth=4 model.heads=2 trainer.accelerator=cpu"
)
TEXTS = (
    "data=text_files data.files=texts/*.txt data.context=24 model.dim=16 model.depth=2 model.heads=2 trainer.accelerator=cpu"
)

TABLES = {
    "": [
        # commands and flags
        ("fitt", "Did you mean 'fit'?"),
        ("report", "report needs the folder of a run or sweep"),
        ("report nowhere", "there is no folder nowhere"),
        ("report run too=page.html", "Did you mean 'to'?"),
        ("fit word", "'word' is not an override; write group=option or key=value"),
        ("fit optimizer.lr = 1", "'optimizer.lr' is not an override; write group=option or key=value, without spaces"),
        ("fit =3", "'=3' is not an override"),
        ("fit --config-dir nowhere", "--config-dir: there is no folder nowhere"),
        (f"fit --config-dir {LONG}", "File name too long"),
        ("fit --config-name banana", "'banana'"),
        ("fit --cfg", "--cfg needs a value"),
        ("fit --info=default", "Did you mean 'defaults'?"),
        ("fit --experimental-rerun x", "not a flag"),
        ("fit --lr 3", "'--lr' is not a flag; options are written key=value. Did you mean 'optimizer.lr=3'?"),
        ("fit task=causal_lm --batch-size=8", "Did you mean 'data.batch_size=8'?"),
        ("fit --epochs -m", "Did you mean 'trainer.max_epochs=...'?"),
        ("fit --model vit_tiny", "Did you mean 'model=vit_tiny'?"),
        # names of options and groups
        ("fit optimizer.lrr=1", "Did you mean 'lr'?"),
        ("fit lr=1", "Did you mean 'optimizer.lr'?"),
        ("fit model=rev_vit_tinny", "of model. Did you mean 'rev_vit_tiny'?"),
        ("fit modle=rev_vit_tiny", "Did you mean 'model'?"),
        ("fit +trainer.precison=32-true", "Did you mean 'precision'?"),
        ("fit ~optimizer", "optimizer"),
        ("fit +seed=3", "An item is already at 'seed'"),
        ("fit 'optimizer.lr = 0.1'", "optimizer.lr = 0.1: write key=value without spaces around ="),
        ("fit data=digits,cifar10", "add -m"),
        ("fit callbacks.driift=null", "callbacks.driift: there is no 'driift' in callbacks. Did you mean 'drift'?"),
        ("fit ~logger.tensorbord", "there is no 'tensorbord' in logger. Did you mean 'tensorboard'?"),
        ("fit callbacks.memory=3", "callbacks.memory: 3 names no class; to leave memory out, give callbacks.memory=null"),
        ("fit optimizer._target_=torch.optim.AdamX", "optimizer._target_: there is no 'AdamX' in torch.optim."),
        ("fit hydra.sweeper.max_batch_size=-3 -m seed=1,2", "hydra.sweeper.max_batch_size=-3"),
        ("fit device=cpu", "Did you mean 'trainer.accelerator'?"),
        ("fit model=timm model.reversible=4", "Did you mean '4bit'?"),
        # several values
        ("fit model=[vit_tiny,rev_vit_small]", "model takes one option; -m model=vit_tiny,rev_vit_small tries each"),
        ("fit -m backward=[autograd,reversible],checkpoint", "-m backward=autograd,reversible tries each"),
        ("fit sweep=optuna", "sweep=optuna: it is about a sweep; add -m to run one"),
        ("fit hydra/launcher=basic", "hydra/launcher=basic: it is about a sweep; add -m"),
        ("fit 'seed=range(3)'", "seed=range(3): to run a sweep over several values, add -m"),
        ("fit -m 'seed=range(0)'", "-m: the sweep has no job"),
        ("fit -m 'model=glob(nothing*)'", "-m: the sweep has no job"),
        # types and ranges
        ("fit trainer.precision=bf16-mixd", "Did you mean 'bf16-mixed'?"),
        ("fit data.batch_size=many", "data.batch_size: 'many' is not a whole number"),
        ("fit data.batch_size=99999999999999999999999", "data.batch_size: 99999999999999999999999 is too large"),
        ("fit optimizer.lr=nan", "optimizer.lr: nan is not a number"),
        ("fit seed=-1", "seed must be in [0, 4294967296), not -1"),
        ("fit memory=lots", "memory: 'lots' is not an amount of memory; write a number and its unit"),
        ("fit backward.store=40", "backward.store: must be a number of blocks up to 6 or indices below 6, not 40"),
        (
            "fit backward.keep=[atention]",
            "backward.keep: takes attention, matmul or operators such as aten.mm.default, not 'atention'",
        ),
        ("test ckpt_path=bes", "ckpt_path: there is no file bes. Did you mean 'best'?"),
        ("fit model.dim=4611686018427387904", "model: its weights do not fit into memory"),
        ("fit callbacks.throughput.peak_flops=-1", "callbacks.throughput.peak_flops: -1.0 must be above 0"),
        ("fit callbacks.checkpoint.monitor=val/acuracy", "Did you mean 'val/accuracy'?"),
        ("fit trainer.max_epochs=0", "max_epochs: must be at least 1"),
        ("fit trainer.max_steps=0", "trainer.max_steps: must be above 0; for no limit, use trainer.max_steps=-1"),
        ("fit trainer.max_time=1h", "trainer.max_time: '1h' is not a time; write DD:HH:MM:SS"),
        ("fit trainer.max_time={days:99999999999}", "trainer.max_time: {'days': 99999999999} is not a time"),
        ("fit trainer.limit_train_batches=0", "trainer.limit_train_batches: must be above 0"),
        # interpolations
        ("fit seed='${nope}'", "seed: Interpolation key 'nope' not found"),
        ("fit seed='${oc.env:NOPE}'", "Environment variable 'NOPE' not found"),
        ("fit -m resume=true seed=1,2", "resume=true: there is no sweep that has begun in runs/fit/sweeps; to start one"),
        # files and folders
        (
            "fit resume=true hydra.run.dir=empty",
            "empty has no checkpoint, because the run ended before it saved one",
        ),
        ("fit resume=true hydra.run.dir=nowhere", "resume=true: there is no folder nowhere; to start it"),
        ("fit resume=true", "no run with a checkpoint in runs/fit"),
        ("fit resume=true ckpt_path=run", "leave out ckpt_path="),
        ("fit ckpt_path=nowhere.ckpt", "no file nowhere.ckpt"),
        ("fit ckpt_path=pipe.ckpt", "ckpt_path: pipe.ckpt is neither a file nor a folder"),
        ("fit 'ckpt_path=[red].ckpt'", "ckpt_path: there is no file [red].ckpt"),
        ("fit ckpt_path=", "ckpt_path: the value is empty"),
        (
            "fit data.val_fraction=0",
            "data: no image is left for val; raise data.val_fraction, or set trainer.limit_val_batches=0",
        ),
        ("fit data=imagefolder", "data.root: a value is needed"),
        ("fit output_dir=/proc/nothing", "cannot write to /proc/nothing"),
        ("fit output_dir=a\udcffb", "output_dir=a\\udcffb' is not text in UTF-8"),
        ("test", "test needs a checkpoint; give ckpt_path="),
        ("predict ckpt_path=text.ckpt", "not a readable checkpoint"),
        ("predict ckpt_path=empty", "empty"),
        ("predict ckpt_path=run texts=occupied", "texts: the checkpoint learned from images; give images=..."),
        ("generate ckpt_path=run prompt=a", "generate: needs a checkpoint of causal_lm"),
        ("predict ckpt_path=run trainer.limit_predict_batches=0", "use trainer.limit_predict_batches=1.0"),
        ("fit task=causal_lm trainer.max_steps=-1", "trainer.max_epochs=-1: needs a limit; set trainer.max_steps or"),
    ],
    "fit task=error_diffusion trainer.accelerator=cpu": [
        ("backward=reversible", "backward=reversible: an error diffusion network has no blocks"),
        ("synthesis=associative", "synthesis: an error diffusion network has no Linear layers"),
        ("compile=true", "compile: an error diffusion network has no blocks"),
        ("optimizer=muon", "optimizer=muon: an error diffusion network has no blocks"),
        ("data=fake data.image_size=2048 data.num_classes=9000", "model: its weights do not fit into memory"),
        ("task.clamp_signs=true", "task.clamp_signs: model.rule=kaneko never changes a sign"),
    ],
    "fit optimizer.in_backward=true trainer.gradient_clip_val=null": [
        ("trainer.gradient_clip_val=1", "optimizer.in_backward: trainer.gradient_clip_val by norm (use null, or trainer."),
        ("trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches above 1 needs gradients after the backward"),
        ("trainer=fsdp", "trainer=fsdp needs gradients after the backward"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed needs gradients after the backward"),
        ("synthesis=shared optimizer=sgd", "a synthesis needs gradients after the backward"),
        ("backward.cuda_graph=true", "backward.cuda_graph=true needs gradients after the backward"),
        ("task=error_diffusion", "ErrorDiffusionClassifier needs gradients after the backward"),
    ],
    f"fit {PLANNED}": [
        ("data.batch_size=auto memory=100KiB", "memory: 100 KiB is too little: with data.batch_size=1 this run needs 1."),
        ("data.batch_size=auto backward=auto", "data.batch_size=auto: cannot be combined with backward=auto"),
        ("backward=auto backward.store=2", "backward=auto: it chooses what to store"),
        ("backward=auto backward.blocks=[x,x,x,x]", "backward.blocks: 'x' is not one of autograd, checkpoint"),
        ("backward.blocks=[autograd]", "backward.blocks: needs backward=auto"),
        ("backward=auto backward.blocks=[pareprop+attention] compile=true", "compiled blocks cannot keep results"),
    ],
    f"plan {PLANNED}": [
        ("trainer.precision=16-mixed device=cpu", "trainer.precision=16-mixed: not supported on the CPU"),
        ("backward=auto device=cuda", "memory: this machine has no GPU"),
    ],
    "fit trainer.accelerator=cpu": [
        ("trainer.devices=2", "trainer=default uses one process"),
        ("trainer=ddp trainer.backend=nccl", "trainer.backend=nccl: needs NVIDIA GPUs"),
        ("trainer=ddp trainer.nccl_max_ctas=2", "trainer.nccl_max_ctas: needs NVIDIA GPUs and trainer.backend=nccl"),
        ("trainer.nccl_high_priority=true", "trainer.nccl_high_priority: needs several processes"),
        ("trainer=ddp trainer.num_nodes=2", "start it with torchrun or srun"),
        (
            "trainer=tp trainer.devices=4 trainer.tensor_parallel=3",
            "trainer.tensor_parallel=3: the number of processes, 4, is not a multiple of it",
        ),
        ("trainer=fsdp trainer.compression=bf16", "trainer.compression=bf16: needs trainer=ddp"),
        ("trainer=ddp trainer.sharded_checkpoints=true", "trainer.sharded_checkpoints=true: needs trainer=fsdp or trainer=tp"),
        ("trainer=fsdp synthesis=bind", "synthesis: needs whole gradients, and trainer=fsdp shards them"),
        ("trainer=fsdp synthesis=associative synthesis.block_length=0", "synthesis=shared or associative with a block length"),
        ("trainer=tp optimizer=adamw_8bit", "optimizer=adamw_8bit: trainer=tp does not support it; use trainer=fsdp"),
        ("trainer=fsdp synthesis=shared synthesis.split=cpu", "synthesis.split: needs whole gradients"),
        ("trainer=tp callbacks=ema", "callbacks.ema: needs whole weights"),
        ("trainer=fsdp backward=auto", "set backward and the batch size yourself"),
        ("trainer=tp model.trained=adapters model.adapters=4", "trainer=tp does not support adapters"),
        ("trainer=pipeline trainer.accumulate_grad_batches=2", "set trainer.microbatches"),
        ("trainer=pipeline trainer.microbatches=3", "trainer.microbatches=3: data.batch_size=32 is not a multiple of it"),
        ("trainer=pipeline trainer.devices=2 data.batch_size=31", "2 stages need at least as many microbatches of equal size"),
        ("trainer=pipeline model.trained=head", "a stage of trainer=pipeline would train nothing"),
        ("trainer=ddp trainer.microbatches=2", "trainer.microbatches: needs trainer=pipeline"),
        ("trainer=pipeline synthesis=associative", "trainer=pipeline divides them; use trainer=ddp"),
        ("trainer=fsdp trainer.precision=16-mixed", "trainer=fsdp has no gradient scaling"),
        ("trainer=tp trainer.overlap=null trainer.signals=true", "trainer.signals: needs trainer=tp and trainer.overlap"),
        ("trainer=tp trainer.devices=2 trainer.signals=true", "trainer.signals: needs NVIDIA GPUs"),
    ],
    f"fit task=causal_lm {TEXTS}": [
        ("data.files=nowhere/*.txt", "nowhere/*.txt"),
        ("data.files=empty.txt", "data"),
        ("data.files=latin.txt", "latin.txt"),
        ("data.files=broken.jsonl", "cannot read broken.jsonl (JSON parse error"),
        ("data.files=5", "data.files: no file matches '5'"),
        ("data.pad_to_multiple_of=16", "but 16 does not divide 24"),
    ],
    f"fit task=sequence_classification {TEXTS}": [
        ("data.label=nothing", "have no column 'nothing'"),
        ("", "data.label: give the field or column"),
    ],
    "init": [
        ("full", "full exists already"),
        ("my-project", "'my-project' cannot be the name of a Python package. Did you mean 'my_project'?"),
        ("torch", "Python knows another 'torch'; give another name, such as my_torch"),
        ("", "init needs a name; for example holotrain init my_project"),
        ("one two", "init takes one name, not 2: one two"),
        ("to=here", "'to' is not an option of init, which takes none."),
    ],
    "fit --config-dir mine trainer.accelerator=cpu experiment=guest": [
        ("optimizer.lr=0", "optimizer.lr: 0.0 must be above 0"),
        ("scheduler.times=0.5", "scheduler.times: 0.5 is not a whole number"),
        ("optimizer._target_=own_package.Lyon", "there is no 'Lyon' in own_package. Did you mean 'Lion'?"),
        ("optimizer._target_=own_packages.Lion", "optimizer._target_: there is no package 'own_packages'"),
        ("model=net model.classes=3", "model.classes: 3 does not fit the data, which have 10; leave it out"),
        ("model._target_=own_package.Switched backward=reversible backward.store=1", "Switched has no argument store; remove"),
        ("logger.journal._target_=own_package.Diary", "logger.journal: own_package.Diary is not a Logger"),
    ],
    "fit --config-dir mine trainer.accelerator=cpu": [
        ("task=denoising optimizer=sgd", "optimizer=sgd: own_package.Denoising takes no optimizer"),
    ],
}
"""By what they begin with."""

WRONG = [(f"{begin} {line}".strip(), words) for begin, table in TABLES.items() for line, words in table]
