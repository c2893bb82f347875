/* Prints how deep the stack gets under each function of an export: its memory is painted before a call, and read after. */
#define main repeated
#include "test_net.c"
#undef main

#if defined(__arm__)
#define READ_POINTER(to) __asm__ volatile("mov %0, sp" : "=r"(to))
#elif defined(__riscv)
#define READ_POINTER(to) __asm__ volatile("mv %0, sp" : "=r"(to))
#else
#define READ_POINTER(to) __asm__ volatile("mov %%rsp, %0" : "=r"(to))
#endif
#define PAINT 0x5B

static unsigned char *low;

__attribute__((noinline)) static void paint(void)
{
    unsigned char *here;
    READ_POINTER(here);
    for (volatile unsigned char *p = low; p < here; p++)
        *p = PAINT;
}

__attribute__((noinline)) static long painted(const unsigned char *top)
{
    const volatile unsigned char *p = low;
    while (*p == PAINT)
        p++;
    return (long)(top - p);
}

#define MEASURE(function, call)                                                                                        \
    __attribute__((noinline)) static void measure_##function(void)                                                     \
    {                                                                                                                  \
        unsigned char *top;                                                                                            \
        paint();                                                                                                       \
        READ_POINTER(top);                                                                                             \
        call;                                                                                                          \
        printf("stack " #function " %ld\n", painted(top));                                                             \
    }

/* @MEASURES@ */

static void fill(void)
{
    const int k = 0;
    (void)k;
    /* @FILL@ */
}

static void *measure(void *unused)
{
    /* @CALLS@ */
    return unused;
}

#ifdef __linux__
#include <pthread.h>
static unsigned char memory_of_stack[1 << 18];
int main(void)
{
    pthread_t thread;
    pthread_attr_t attributes;
    low = memory_of_stack + (1 << 16);
    fill();
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, memory_of_stack, sizeof memory_of_stack);
    return pthread_create(&thread, &attributes, measure, 0) || pthread_join(thread, 0);
}
#else
int main(void)
{
    unsigned char *here;
    READ_POINTER(here);
    low = here - (1 << 16);
    fill();
    measure(0);
    return 0;
}
#endif
