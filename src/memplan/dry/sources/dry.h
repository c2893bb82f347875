/* Shared by the parts of libdry.so: a CUDA device that is only an address range. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int major, minor, sms;
    size_t memory, context;                            /* bytes; context: what CUDA itself holds of the card */
    int l2, optin_smem, smem_per_sm, threads_per_sm, blocks_per_sm, sm_khz, mem_khz, bus, binary;
    char name[128];
} dry_card;

const dry_card *dry_gpu(void);                         /* as MEMPLAN_DRY_CARD describes it */
int dry_trace(void);                                   /* MEMPLAN_DRY_TRACE=1: log every call that is not answered; 2: all mallocs */
int dry_missing(const char *name, int code);           /* writes a name to the file MEMPLAN_DRY_LOG once, returns code */
int dry_is_device(const void *p);

#define DRY_VMM 0x200000000000ull                      /* where expandable segments lie: up to 16 TiB from here */
