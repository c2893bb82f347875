/* Zephyr's printk by the C library's printf. */
#ifndef ZEPHYR_SYS_PRINTK_H
#define ZEPHYR_SYS_PRINTK_H

#include <stdio.h>

#define printk(...) ((void)printf(__VA_ARGS__))

#endif
