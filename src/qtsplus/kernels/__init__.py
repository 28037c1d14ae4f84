"""Relevance three times: readable (`naive`), in blocks (`chunked_log_relevance` of the Hub files), for GPUs (`triton`).

All follow the contract of `qtsplus.relevance_qtsplus.chunked_log_relevance`; the model takes one by `relevance_kernel`.
"""
