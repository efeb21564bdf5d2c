"""A run that takes a second."""

SMALL = [
    "model.dim=16",
    "model.depth=2",
    "model.heads=2",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "trainer.log_every_n_steps=1",
]
