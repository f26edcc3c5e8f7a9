/* A tool for NVTX: prints the ranges of a process. NVTX loads it by NVTX_INJECTION64_PATH, and calls
 * InitializeInjectionNvtx2. Numbers and layouts are those of nvtxTypes.h and nvtxEventAttributes_t. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { CALLBACKS = 1, CORE2 = 5 };
enum { RANGE_START = 2, RANGE_END = 3, RANGE_PUSH = 4, RANGE_POP = 5, NAME_CATEGORY = 8,
       REGISTER_STRING = 10, CREATE_DOMAIN = 12 };

typedef struct {
    size_t size;
    int (*get_functions)(uint32_t module, void ****functions, unsigned *count);
} Callbacks;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const char *message; /* the handle of a registered string is what `intern` returned */
} Attributes;

static uint64_t last;
static uint64_t start(const char *domain, const Attributes *of) {
    printf("%s start %llu: %s, category %u\n", domain, (unsigned long long)++last, of->message,
           of->category);
    return last;
}
static int end(const char *domain, uint64_t range) {
    return printf("%s end %llu\n", domain, (unsigned long long)range);
}
static int push(const char *domain, const Attributes *of) {
    printf("%s push: %s\n", domain, of->message);
    return 0;
}
static int pop(const char *domain) {
    printf("%s pop\n", domain);
    return 0;
}
static void category(const char *domain, uint32_t number, const char *name) {
    printf("%s category %u: %s\n", domain, number, name);
}
static char *create(const char *name) { return strdup(name); }
static char *intern(const char *domain, const char *text) { return strdup(text); }

int InitializeInjectionNvtx2(const Callbacks *(*exported)(uint32_t)) {
    void ***functions;
    unsigned count;
    if (!exported(CALLBACKS)->get_functions(CORE2, &functions, &count))
        return 0;
    *functions[RANGE_START] = (void *)start;
    *functions[RANGE_END] = (void *)end;
    *functions[RANGE_PUSH] = (void *)push;
    *functions[RANGE_POP] = (void *)pop;
    *functions[NAME_CATEGORY] = (void *)category;
    *functions[REGISTER_STRING] = (void *)intern;
    *functions[CREATE_DOMAIN] = (void *)create;
    return setvbuf(stdout, NULL, _IOLBF, 0) == 0;
}
