/* What the example's main.c uses of Zephyr's kernel.h, without Zephyr: there are no other threads, and no clock. */
#ifndef ZEPHYR_KERNEL_H
#define ZEPHYR_KERNEL_H

#include <stddef.h>
#include <stdint.h>

static inline void k_yield(void) {}

static inline int32_t k_msleep(int32_t ms)
{
    (void)ms;
    return 0;
}

#endif
