"""The connector's side of vLLM's scheduler: what is offered, what is saved, for whom.

:class:`~tierkv_adapters.vllm.scheduling.scheduler.SchedulerSide` answers vLLM's calls; nothing here
imports vLLM.
"""
