"""Where each name lives that the reference documents promise (DESIGN.md, section 8): a path, an issue, or a reason.

``distributed_state.rst`` is compared with the code in full; this table is about the other four.
"""

from __future__ import annotations

EXISTS: dict[str, dict[str, str]] = {
    "distributed_world.md": {},
    "data_parallel_guide.md": {
        "DistributedDataParallel": "xffl:shard",  # with hsdp=1
        "init_process_group": "xffl.distributed:setup_distributed_process_group",
        "destroy_process_group": "xffl.distributed:cleanup_distributed_process_group",
        "test_single_process": "xffl:session",  # one process without a launcher
        "main": "xffl.cluster.launch:launch_local",  # the document's launcher.py
    },
    "strategy_patterns.md": {
        "init_process_group": "xffl.distributed:setup_distributed_process_group",
        "rank": "xffl.distributed.distributed_state:DistributedState.rank",
        "world_size": "xffl.distributed.distributed_state:DistributedState.world_size",
        "local_rank": "xffl.distributed.distributed_state:DistributedState.node_local_rank",
        "wrap_model": "xffl:shard",
        "setup": "xffl.distributed:setup_distributed_process_group",
    },
    "trainer_core_concepts.md": {},
}
"""Names that can be imported now, as ``module:attribute``."""

ISSUES: dict[str, dict[int, str]] = {
    "distributed_world.md": {
        5: """
        DistributedWorld DeviceParameters FSDP setup get_mesh world_mesh device is_global_zero rank local_rank
        world_size all_reduce all_gather barrier get_total_norm train_context loss_parallel loss_parallel_enabled
        get_fsdp_config
        get_fsdp_mp_policy dp_size dp_rank dp_shard_enabled tp_enabled pp_enabled cp_enabled init_timeout_seconds
        """,
        6: "training_step world",
    },
    "data_parallel_guide.md": {
        5: "find_unused_parameters gradient_as_bucket_view device_ids amp",
    },
    "strategy_patterns.md": {
        5: """
        DistributedStrategy from_config FSDPStrategy DDPStrategy DeepSpeedStrategy SingleGPUStrategy is_main_process
        backward clip_grad_norm save_checkpoint load_checkpoint to_device ds_config _build_ds_config model_engine
        CheckpointManager output_dir keep_last save _rotate
        launch_distributed script config gpus_per_node master_addr master_port
        """,
        6: "find_latest_checkpoint auto_resume",
    },
    "trainer_core_concepts.md": {
        5: """
        DistributedWorld world_size rank local_rank all_reduce all_gather train_context _build_mesh dp_mesh tp_mesh
        pp_mesh dp_process_group mixed_precision_enabled mixed_precision_dtype
        dp_degree enable_fsdp fsdp_limit_all_gathers fsdp_forward_prefetch
        """,
        6: """
        BaseTrainer BaseTrainerConfig DreamTrainerConfig world config callbacks
        SetupMixin SetupConfigMixin ModelSetupMixin OptimizerAndSchedulerSetupMixin DataLoaderSetupMixin
        EvalMetricMixin EvalMetricConfigMixin LoggerMixin WandBLoggerMixin WandBLoggerConfigMixin QuantizeMixin
        setup fit train eval configure_models init_weights configure_optimizers configure_schedulers
        configure_dataloaders configure_metrics compute_metrics apply_quantization train_dataloader val_dataloader
        training_step validation_step backward step is_accumulating_gradients no_gradient_sync
        _num_gradient_accumulation_steps _is_last_training_batch perform_training_epoch perform_validation_epoch
        log_scalar log_image log_metrics global_step current_epoch local_batches
        state_dict load_state_dict named_models named_optimizers named_schedulers
        Callback CheckpointCallback checkpoint_dir save_frequency keep_last_n
        pre_train_epoch post_train_epoch pre_train_batch post_train_batch
        pre_val_epoch post_val_epoch pre_val_batch post_val_batch
        on_train_start on_train_batch_end on_val_epoch_end on_validation_end
        """,
    },
}
"""Names that an issue brings."""

TORCH = "torch's own, used as it is: torch.distributed needs no second interface"
THEIRS = "code of a user, in an example of the document"
SYNTAX = "part of a path in the document, no name of an interface"
LATER = "torchft's replicas come in a later issue (DESIGN.md, section 8)"
PRIVATE = "a private detail of the document's class"
ANOTHER = "a class that the document shows as what not to do, or to explain Python"

REASONS: dict[str, dict[str, str]] = {
    "distributed_world.md": {
        LATER: """
        FaultTolerantWorld FaultToleranceParameters ft_manager enable min_replica_size max_consecutive_failures
        """,
        THEIRS: "MyTrainer compute_loss",
    },
    "data_parallel_guide.md": {
        TORCH: """
        is_initialized get_rank get_world_size barrier all_reduce broadcast all_gather ReduceOp
        Module Linear ReLU Sequential CrossEntropyLoss functional nn optim cuda device float32 ones randn randint
        zeros_like
        """,
        THEIRS: "MyModel create_model train_loop forward linear relu output",
        SYNTAX: "distributed",
    },
    "strategy_patterns.md": {
        TORCH: "barrier get_rank get_world_size Module ShardingStrategy",
        PRIVATE: "_local_rank _optimizer _rank _scheduler _world_size",
        SYNTAX: "py utils",
        "the single strategy's device is the state's current_device": "device",
    },
    "trainer_core_concepts.md": {
        TORCH: "Linear",
        THEIRS: """
        MyTrainer MyTrainerConfig MyCallback model optimizer scheduler accuracy f1_score perplexity compute_loss
        _init_weights
        """,
        SYNTAX: "md mixins",
        ANOTHER: """
        Trainer DistributedTrainer LoggingTrainer setup_distributed ModelMixin OptimizerMixin setup_models
        setup_optimizers
        """,
    },
}
"""Names that xffl does not take over, by the reason."""
