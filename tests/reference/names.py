"""Where each name lives that the reference documents promise (DESIGN.md, section 8): a path, an issue, or a reason.

``distributed_state.rst`` is compared with the code in full; this table is about the other four.
"""

from __future__ import annotations


def under(owner: str, names: str) -> dict[str, str]:
    """Return the path of each name inside a module or a class."""
    return {name: f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names.split()}


EXISTS: dict[str, dict[str, str]] = {
    "distributed_world.md": {
        "DistributedWorld": "xffl:DistributedWorld",
        "training_step": "xffl.training:BaseTrainer.training_step",
        "world": "xffl.training:BaseTrainer.world",
        "DeviceParameters": "xffl.distributed:DeviceParameters",
        "FSDP": "xffl.distributed:DeviceParameters.FSDP",
        "init_timeout_seconds": "xffl.distributed:CommParameters.init_timeout_seconds",
        "FaultTolerantWorld": "xffl.distributed:FaultTolerantWorld",
        "FaultToleranceParameters": "xffl.distributed:FaultToleranceParameters",
        "ft_manager": "xffl.distributed:FaultTolerantWorld.ft_manager",
        **under("xffl.distributed:FaultToleranceParameters", "enable min_replica_size max_consecutive_failures"),
        **under(
            "xffl:DistributedWorld",
            """
            setup get_mesh world_mesh device is_global_zero rank local_rank world_size all_reduce all_gather
            barrier get_total_norm train_context loss_parallel loss_parallel_enabled get_fsdp_config
            get_fsdp_mp_policy dp_size dp_rank dp_shard_enabled tp_enabled pp_enabled cp_enabled
            """,
        ),
    },
    "data_parallel_guide.md": {
        "find_unused_parameters": "xffl.parallel:DDPConfig.find_unused_parameters",
        "gradient_as_bucket_view": "xffl.parallel:DDPConfig.gradient_as_bucket_view",
        "amp": "xffl:DistributedWorld.train_context",
        "DistributedDataParallel": "xffl:shard",  # with hsdp=1
        "init_process_group": "xffl.distributed:setup_distributed_process_group",
        "destroy_process_group": "xffl.distributed:cleanup_distributed_process_group",
        "test_single_process": "xffl:session",  # one process without a launcher
        "main": "xffl.cluster.launch.local:launch_local",  # the document's launcher.py
    },
    "strategy_patterns.md": {
        "init_process_group": "xffl.distributed:setup_distributed_process_group",
        **under(
            "xffl.parallel:DistributedStrategy",
            """
            from_config rank world_size local_rank wrap_model setup is_main_process backward clip_grad_norm
            save_checkpoint load_checkpoint to_device device
            """,
        ),
        **under(
            "xffl.parallel",
            """
            DistributedStrategy FSDPStrategy DDPStrategy DeepSpeedStrategy SingleGPUStrategy
            """,
        ),
        "ds_config": "xffl.parallel:DeepSpeedStrategy.ds_config",
        "_build_ds_config": "xffl.parallel:DeepSpeedStrategy._build_ds_config",
        "model_engine": "xffl.parallel:DeepSpeedStrategy.model_engine",
        "CheckpointManager": "xffl.checkpoint:CheckpointManager",
        "save": "xffl.checkpoint:CheckpointManager.save",
        "_rotate": "xffl.checkpoint:CheckpointManager._rotate",
        "find_latest_checkpoint": "xffl.checkpoint:find_latest_checkpoint",
        "auto_resume": "xffl.checkpoint:auto_resume",
        "launch_distributed": "xffl.cluster.launch:launch_distributed",
    },
    "trainer_core_concepts.md": {
        "DistributedWorld": "xffl:DistributedWorld",
        **under(
            "xffl:DistributedWorld",
            """
            world_size rank local_rank all_reduce all_gather train_context dp_mesh tp_mesh pp_mesh
            mixed_precision_enabled mixed_precision_dtype
            """,
        ),
        "DreamTrainerConfig": "xffl.training:BaseTrainerConfig",  # the document's second name for it
        **under(
            "xffl.training",
            """
            BaseTrainer BaseTrainerConfig SetupMixin SetupConfigMixin ModelSetupMixin OptimizerAndSchedulerSetupMixin
            DataLoaderSetupMixin EvalMetricMixin EvalMetricConfigMixin LoggerMixin WandBLoggerMixin
            WandBLoggerConfigMixin QuantizeMixin Callback
            """,
        ),
        "config": "xffl.training:BaseTrainerConfig",  # BaseTrainer's attribute, and so is the next
        "callbacks": "xffl.training:CallbackCollection",
        **under(
            "xffl.training:BaseTrainer",
            """
            world setup fit train eval training_step validation_step backward step
            is_accumulating_gradients no_gradient_sync _num_gradient_accumulation_steps _is_last_training_batch
            perform_training_epoch perform_validation_epoch log_scalar log_image log_metrics global_step current_epoch
            local_batches state_dict load_state_dict named_models named_optimizers named_schedulers compute_metrics
            """,
        ),
        **under("xffl.training:SetupMixin", "configure_models init_weights configure_optimizers configure_schedulers"),
        **under("xffl.training:SetupMixin", "train_dataloader val_dataloader"),
        "configure_dataloaders": "xffl.training:SetupMixin.configure_dataloaders",
        "configure_metrics": "xffl.training:EvalMetricMixin.configure_metrics",
        "apply_quantization": "xffl.training:QuantizeMixin.apply_quantization",
        **under("xffl.training.callbacks", "CheckpointCallback"),
        **under(
            "xffl.training:Callback",
            """
            pre_train_epoch post_train_epoch pre_train_batch post_train_batch pre_val_epoch post_val_epoch
            pre_val_batch post_val_batch on_train_start on_train_batch_end on_val_epoch_end on_validation_end
            """,
        ),
        "fsdp_forward_prefetch": "xffl.distributed:DeviceParameters.fsdp_forward_prefetch",
    },
}
"""Names that can be imported now, as ``module:attribute``."""

ISSUES: dict[str, dict[int, str]] = {
    "distributed_world.md": {},
    "data_parallel_guide.md": {},
    "strategy_patterns.md": {},
    "trainer_core_concepts.md": {},
}
"""Names that an issue brings."""

TORCH = "torch's own, used as it is: torch.distributed needs no second interface"
THEIRS = "code of a user, in an example of the document"
SYNTAX = "part of a path in the document, no name of an interface"
PRIVATE = "a private detail of the document's class"
ANOTHER = "a class that the document shows as what not to do, or to explain Python"

REASONS: dict[str, dict[str, str]] = {
    "distributed_world.md": {
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
        "xffl.shard tells DDP the device that the state names": "device_ids",
    },
    "strategy_patterns.md": {
        TORCH: "barrier get_rank get_world_size Module ShardingStrategy",
        PRIVATE: "_local_rank _optimizer _rank _scheduler _world_size",
        SYNTAX: "py utils",
        "parameters of launch_distributed, by these names": "script config gpus_per_node master_addr master_port",
        "parameters of CheckpointManager, by these names": "output_dir keep_last",
    },
    "trainer_core_concepts.md": {
        TORCH: "Linear",
        THEIRS: """
        MyTrainer MyTrainerConfig MyCallback model optimizer scheduler accuracy f1_score perplexity compute_loss
        _init_weights
        """,
        SYNTAX: "md mixins",
        "parameters of CheckpointCallback, by these names": "checkpoint_dir save_frequency keep_last_n",
        "DistributedWorld.get_group('dp') and get_mesh serve every axis": "dp_process_group _build_mesh",
        "DeviceParameters say dp_replicate and dp_shard apart": "dp_degree enable_fsdp",
        "FSDP2 limits the gathered weights by itself": "fsdp_limit_all_gathers",
        ANOTHER: """
        Trainer DistributedTrainer LoggingTrainer setup_distributed ModelMixin OptimizerMixin setup_models
        setup_optimizers
        """,
    },
}
"""Names that xffl does not take over, by the reason."""
