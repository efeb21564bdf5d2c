"""Wrong command lines: what is typed after ``holotrain``, split as a shell splits it, and what the answer must say.

They are typed in a folder with a finished training in ``run``, a file ``text.ckpt`` that is no checkpoint, folders ``empty``
and ``full``, a pipe ``pipe.ckpt``, to which nobody writes, and the package and options of ``own_classes``, in ``mine``.
"""

PLANNED = (
    "data=fake data.image_size=16 data.train_size=128 data.val_size=64 data.test_size=64 data.batch_size=64 "
    "model.dim=24 model.depth=2 model.heads=2 trainer.accelerator=cpu"
)

TABLES = {
    "": [
        # commands and flags
        ("fitt", "Did you mean 'fit'?"),
        ("report runs/fit", "report is gone: tensorboard --logdir runs compares runs"),
        ("fit word", "'word' is not an override; write group=option or key=value"),
        ("fit resume", "without spaces around =. Did you mean 'resume=true'?"),
        ("fit optimizer.lr = 1", "'optimizer.lr' is not an override; write group=option or key=value, without spaces"),
        ("fit --config-dir nowhere", "--config-dir: there is no folder nowhere"),
        ("fit --cfg", "--cfg needs a value"),
        ("fit --lr 3", "'--lr' is not a flag; options are written key=value. Did you mean 'optimizer.lr=3'?"),
        ("fit callbacks=ema +callbacks=ema", "callbacks: it is given twice, as callbacks=ema and"),
        # names of options and groups
        ("fit optimizer.lrr=1", "Did you mean 'lr'?"),
        ("fit lr=1", "Did you mean 'optimizer.lr'?"),
        ("fit model=rev_vit_tinny", "of model. Did you mean 'rev_vit_tiny'?"),
        ("fit modle=rev_vit_tiny", "Did you mean 'model'?"),
        ("fit +seed=3", "An item is already at 'seed'"),
        ("fit data=digits,cifar10", "add -m"),
        ("fit callbacks.driift=null", "callbacks.driift: there is no 'driift' in callbacks. Did you mean 'drift'?"),
        ("fit callbacks.memory=3", "callbacks.memory: 3 names no class; to leave memory out, give callbacks.memory=null"),
        ("fit optimizer._target_=torch.optim.AdamX", "optimizer._target_: there is no 'AdamX' in torch.optim."),
        ("fit device=cpu", "Did you mean 'trainer.accelerator'?"),
        # several values
        ("fit model=[vit_tiny,rev_vit_small]", "model takes one option; -m model=vit_tiny,rev_vit_small tries each"),
        ("fit sweep=optuna", "sweep=optuna: it is about a sweep; add -m to run one"),
        ("fit -m 'seed=range(0)'", "-m: the sweep has no job"),
        ("fit -m 'hydra.sweeper.params={optimizer.lr:\"1e-3,1e-4\"}'", "as a word of its own: -m optimizer.lr=1e-3,1e-4"),
        # what does something else here
        (
            "fit callbacks.find._target_=lightning.pytorch.callbacks.LearningRateFinder",
            "callbacks.find: LearningRateFinder does not work here; -m sweep=learning_rate tries several rates",
        ),
        (
            "fit callbacks.find._target_=lightning.pytorch.callbacks.BatchSizeFinder",
            "callbacks.find: BatchSizeFinder does not work here; data.batch_size=auto plans the largest batch",
        ),
        ("fit task=causal_lm data.streaming=true debug=overfit", "a stream has no batch twice; set data.streaming=false"),
        ("fit scheduler.monitor=val/loss", "scheduler.monitor: cosine follows no metric; leave it out"),
        # types and ranges
        ("fit trainer.precision=bf16-mixd", "Did you mean 'bf16-mixed'?"),
        ("fit optimizer.lr=nan", "optimizer.lr: nan is not a number"),
        ("fit optimizer.lr=-1", "optimizer.lr: must be at least 0, not -1"),
        ("fit seed=-1", "seed must be in [0, 4294967296), not -1"),
        ("fit memory=lots", "memory: 'lots' is not an amount of memory; write a number and its unit"),
        ("fit backward.store=40", "backward.store: must be a number of blocks up to 6 or indices below 6, not 40"),
        ("fit model.dim=4611686018427387904", "model: its weights do not fit into memory"),
        ("fit callbacks.checkpoint.monitor=val/acuracy", "Did you mean 'val/accuracy'?"),
        ("fit trainer.max_steps=0", "trainer.max_steps: must be above 0; for no limit, use trainer.max_steps=-1"),
        ("fit trainer.max_time=1h", "trainer.max_time: '1h' is not a time; write DD:HH:MM:SS"),
        ("fit task=causal_lm trainer.max_steps=-1", "trainer.max_epochs=-1: needs a limit; set trainer.max_steps or"),
        ("fit scheduler=multistep scheduler.milestones=[0.6,0.8]", "[0.6, 0.8] is not a list, each of it a whole number"),
        ("fit seed='${nope}'", "seed: Interpolation key 'nope' not found"),
        # files and folders
        ("fit resume=true hydra.run.dir=empty", "empty has no checkpoint, because the run ended before it saved one"),
        ("fit resume=true", "no run with a checkpoint in runs/fit"),
        ("fit ckpt_path=nowhere.ckpt", "no file nowhere.ckpt"),
        ("fit ckpt_path=pipe.ckpt", "ckpt_path: pipe.ckpt is neither a file nor a folder"),
        ("fit data.val_fraction=0", "data: no image is left for val; raise data.val_fraction, or set"),
        ("fit data=imagefolder", "data.root: a value is needed"),
        ("fit output_dir=/proc/nothing", "cannot write to /proc/nothing"),
        ("fit output_dir=a\udcffb", "output_dir=a\\udcffb' is not text in UTF-8"),
        ("test", "test needs a checkpoint; give ckpt_path="),
        ("predict ckpt_path=text.ckpt", "not a readable checkpoint"),
        ("predict ckpt_path=run texts=text.ckpt", "texts: the checkpoint learned from images; give images=..."),
        ("init", "init needs one name, not none; for example holotrain init my_project"),
        ("init full", "full exists already"),
        ("init my-project", "'my-project' cannot be the name of a Python package. Did you mean 'my_project'?"),
    ],
    "fit trainer.accelerator=cpu": [
        ("task=error_diffusion compile=true", "compile: an error diffusion network has no blocks"),
        ("task=error_diffusion task.clamp_signs=true", "task.clamp_signs: model.rule=kaneko never changes a sign"),
        ("optimizer.in_backward=true trainer=fsdp trainer.gradient_clip_val=null", "trainer=fsdp needs gradients after the"),
        ("trainer.devices=2", "trainer=default uses one process"),
        ("trainer=ddp trainer.num_nodes=2", "start it with torchrun"),
        ("trainer=fsdp trainer.compression=bf16", "trainer.compression=bf16: needs trainer=ddp"),
        ("trainer=fsdp synthesis=bind", "synthesis: needs whole gradients, and trainer=fsdp shards them"),
        ("trainer=tp callbacks=ema", "callbacks.ema: needs whole weights"),
        ("trainer=pipeline trainer.microbatches=3", "trainer.microbatches=3: data.batch_size=32 is not a multiple of it"),
        ("trainer=tp trainer.devices=4 trainer.tensor_parallel=3", "the number of processes, 4, is not a multiple of it"),
        ("--config-dir mine experiment=guest optimizer._target_=own_packages.Lion", "there is no package 'own_packages'"),
    ],
    f"fit {PLANNED}": [
        ("data.batch_size=auto memory=100KiB", "memory: 100 KiB is too little: with data.batch_size=1 this run needs "),
        ("data.batch_size=auto backward=auto", "data.batch_size=auto: cannot be combined with backward=auto"),
        ("backward=auto backward.store=2", "backward=auto: it chooses what to store"),
        ("backward.blocks=[autograd]", "backward.blocks: needs backward=auto"),
    ],
}
"""By what they begin with."""

WRONG = [(f"{begin} {line}".strip(), message) for begin, table in TABLES.items() for line, message in table]
